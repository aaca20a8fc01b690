#!/usr/bin/env python3
"""Writes the kernels of a training step of each rank, from files of bench/timeline.c, as lines of JSON.

  timeline.py FILE... > docs/benchmarks/timeline-CASE.jsonl

Ranks are in the order of their devices. The step is one with an exchange of gradients whose length is the median.
"make figures" draws the records.
"""
import json
import sys

KINDS = [  # part of a kernel's name, and what it is
    ("linear", "forward pass"), ("softmax", "forward pass"), ("_grad", "backward pass"), ("mlp_step", "optimizer"), ("direct", "all_reduce")]


def load(name):
    """Returns the device and its kernels in their order: begin and end in us, blocks, and the place in KINDS."""
    device, kernels = -1, []
    with open(name) as lines:
        for line in lines:
            begin, end, device, _, blocks, _, _, kernel = line.split()
            for k, (part, _) in enumerate(KINDS):
                if part in kernel:
                    kernels.append((int(begin) / 1000, int(end) / 1000, int(blocks), k))
    return int(device), sorted(kernels)


def steps(kernels):
    """Cuts where a forward pass begins: after the optimizer."""
    cut, optimized = [], False
    for k in kernels:
        if optimized and KINDS[k[3]][0] == "linear":
            cut.append([])
            optimized = False
        optimized = optimized or KINDS[k[3]][0] == "mlp_step"
        if cut:
            cut[-1].append(k)
    return cut[:-1]


def exchanges(step):
    return any(KINDS[k[3]][0] == "direct" for k in step)


def main():
    ranks = [steps(kernels) for _, kernels in sorted(map(load, sys.argv[1:]))]
    ranks = [r for r in ranks if any(map(exchanges, r))]
    if not ranks:
        sys.exit(__doc__)
    whole = [s for s in ranks[0] if exchanges(s)]
    chosen = sorted(whole, key=lambda s: s[-1][1] - s[0][0])[len(whole) // 2]
    begin = chosen[0][0]
    same = [min(r, key=lambda s: abs(s[0][0] - begin)) for r in ranks]  # the clocks of a host's GPUs agree
    begin = min(s[0][0] for s in same)
    for rank, step in enumerate(same):
        for a, b, blocks, k in step:
            print(json.dumps({"rank": rank, "kind": KINDS[k][1], "begin_us": round(a - begin), "end_us": round(b - begin), "blocks": blocks}))


if __name__ == "__main__":
    main()
