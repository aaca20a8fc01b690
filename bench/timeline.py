#!/usr/bin/env python3
"""Draws the kernels of a training step of each rank, from files of bench/timeline.c, as an SVG.

  timeline.py FILE... > step.svg

Ranks are in the order of their devices. A rank has two rows: the trainer's stream, and the all-reduces. The step is one with an exchange of
gradients whose length is the median.
"""
import sys

WIDTH, LEFT, ROW, GAP, TOP = 1000, 110, 26, 22, 46
KINDS = [  # part of a kernel's name, what it is, its colour
    ("linear", "forward pass", "#9ecae1"), ("softmax", "forward pass", "#9ecae1"),
    ("_grad", "backward pass", "#4292c6"), ("mlp_step", "optimizer", "#bdbdbd"), ("direct", "all_reduce", "#e6550d")]


def load(name):
    """Returns the device and its kernels in their order: begin and end in us, blocks, and the place in KINDS."""
    device, kernels = -1, []
    with open(name) as lines:
        for line in lines:
            begin, end, device, _, blocks, _, _, kernel = line.split()
            for k, (part, _, _) in enumerate(KINDS):
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


def text(x, y, what, **more):
    attributes = "".join(' %s="%s"' % (k.replace("_", "-"), v) for k, v in more.items())
    return '<text x="%.1f" y="%.1f"%s>%s</text>' % (x, y, attributes, what)


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
    length = max(s[-1][1] for s in same) - begin
    scale = (WIDTH - LEFT - 10) / length
    height = TOP + len(same) * (2 * ROW + GAP) + 26
    out = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12">' % (WIDTH, height),
           '<rect width="%d" height="%d" fill="white"/>' % (WIDTH, height)]
    x = LEFT
    for name, color in dict((n, c) for _, n, c in KINDS).items():
        out += ['<rect x="%d" y="12" width="14" height="14" fill="%s"/>' % (x, color), text(x + 19, 24, name)]
        x += 130
    for r, step in enumerate(same):
        y = TOP + r * (2 * ROW + GAP)
        out += [text(8, y + 17, "rank %d, trainer" % r), text(8, y + ROW + 17, "all-reduces")]
        for a, b, blocks, k in step:
            down = ROW if KINDS[k][0] == "direct" else 0
            out.append('<rect x="%.2f" y="%d" width="%.2f" height="%d" fill="%s"><title>%s: %.0f to %.0f us, %d blocks</title></rect>' % (
                LEFT + (a - begin) * scale, y + down, max((b - a) * scale, 0.4), ROW - 3, KINDS[k][2], KINDS[k][1], a - begin, b - begin, blocks))
    unit = next(u for u in (10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000) if u * 12 >= length)
    for tick in range(0, int(length) + 1, unit):
        x = LEFT + tick * scale
        out += ['<line x1="%.1f" x2="%.1f" y1="%d" y2="%d" stroke="#ddd"/>' % (x, x, TOP - 6, height - 24),
                text(x, height - 9, "%d us" % tick, text_anchor="middle", fill="#555")]
    print("\n".join(out + ["</svg>"]))


if __name__ == "__main__":
    main()
