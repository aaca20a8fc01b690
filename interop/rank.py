#!/usr/bin/env python3
"""A PyTorch rank that runs the script of package script: rank.py FILE [URL].

It joins by PyTorch's environment variables, or at URL, and prints what
`c10d rank` prints. rank.py --torchrun ARGUMENTS is torchrun.
"""
import datetime
import functools
import hashlib
import json
import os
import re
import runpy
import sys

import torch
import torch.distributed as dist

OPS = {"sum": "SUM", "avg": "AVG", "product": "PRODUCT", "min": "MIN", "max": "MAX",
       "band": "BAND", "bor": "BOR", "bxor": "BXOR"}

# What gloo says when the group is beyond use; other errors are refusals.
BROKEN = re.compile("onnection|Timed out|pair closure|Broken pipe")


def op_of(line):
    name = line.get("reduce") or "sum"
    if name == "premul_sum":
        return dist._make_nccl_premul_sum(line.get("factor", 0))
    return getattr(dist.ReduceOp, OPS[name])


def dtype_of(line):
    return getattr(torch, line.get("dtype") or "float32")


def make(line, rank, j, shape):
    dtype, seed = dtype_of(line), line.get("seed", 0)
    n = 1
    for d in shape:
        n *= d
    # What the rule gives repeats itself after 17 elements.
    i = torch.arange(17, dtype=torch.int64) + 1009 * j
    k = (7 * i + 13 * rank + 31 * seed) % 17 - 8
    if line.get("fill", "int") == "frac":
        v = (k.to(torch.float64) / 7)
    elif dtype == torch.bool:
        v = k.bitwise_and(1)
    elif str(dtype).startswith("torch.uint"):
        v = k + 8
    else:
        v = k
    return v.to(dtype).repeat(n // 17 + 1)[:n].clone().reshape(shape)


def digest(tensors):
    """Hashes the elements' bytes. A bool counts as 0 or 1: gloo adds bools as
    bytes, and a sum of two leaves 2 in memory."""
    h = hashlib.sha256()
    for t in tensors:
        if t.numel():
            flat = t.contiguous().reshape(-1).view(torch.uint8)
            h.update((flat.ne(0).to(torch.uint8) if t.dtype == torch.bool else flat).numpy())
    return h.hexdigest()


def times(shape, n):
    return [shape[0] * n] + shape[1:] if shape else [n]


def run(line, groups):
    op, shape, group = line["op"], line.get("shape") or [], groups[line.get("group", "")]
    me = dist.get_rank()
    if op == "new_group":
        local = {"use_local_synchronization": True} if line.get("local") else {}
        groups[line["name"]] = dist.new_group(sorted(line["ranks"]), **local)
        return None
    if group is None or dist.get_rank(group) < 0:
        return None
    size, r = dist.get_world_size(group), dist.get_rank(group)

    def mine(j, shape):
        return make(line, me, j, shape)

    def zero(shape):
        return torch.zeros(shape, dtype=dtype_of(line))

    if op == "all_reduce":
        t = mine(0, shape)
        dist.all_reduce(t, op_of(line), group=group)
        return [t]
    if op == "all_reduce_coalesced":
        ts = [mine(j, s) for j, s in enumerate(line["shapes"])]
        dist.all_reduce_coalesced(ts, op_of(line), group=group)
        return ts
    if op == "reduce":
        t = mine(0, shape)
        dist.reduce(t, line.get("root", 0), op_of(line), group=group)
        return [t] if me == line.get("root", 0) else None
    if op == "broadcast":
        t = mine(0, shape)
        dist.broadcast(t, line.get("root", 0), group=group)
        return [t]
    if op == "all_gather":
        out = [zero(shape) for _ in range(size)]
        dist.all_gather(out, mine(0, shape), group=group)
        return out
    if op == "all_gather_into_tensor":
        out = zero(times(shape, size))
        dist.all_gather_into_tensor(out, mine(0, shape), group=group)
        return [out]
    if op == "gather":
        root = line.get("root", 0)
        out = [zero(shape) for _ in range(size)] if me == root else None
        dist.gather(mine(0, shape), out, root, group=group)
        return out
    if op == "scatter":
        root, out = line.get("root", 0), zero(shape)
        parts = [mine(j, shape) for j in range(size)] if me == root else None
        dist.scatter(out, parts, root, group=group)
        return [out]
    if op == "reduce_scatter":
        out = zero(shape)
        dist.reduce_scatter(out, [mine(j, shape) for j in range(size)], op_of(line), group=group)
        return [out]
    if op == "reduce_scatter_tensor":
        out = zero(shape or [1])
        dist.reduce_scatter_tensor(out, mine(0, times(shape, size)), op_of(line), group=group)
        return [out]
    if op == "all_to_all":
        out = [zero(shape) for _ in range(size)]
        dist.all_to_all(out, [mine(j, shape) for j in range(size)], group=group)
        return out
    if op == "all_to_all_single":
        splits = line.get("splits")
        if splits is None:
            out = zero(times(shape, size))
            dist.all_to_all_single(out, mine(0, times(shape, size)), group=group)
        else:
            recv = [splits[q][r] for q in range(size)]
            out = zero([sum(recv)])
            dist.all_to_all_single(out, mine(0, [sum(splits[r])]), recv, splits[r], group=group)
        return [out]
    if op in ("send_recv", "recv_any"):
        tag = line.get("tag", 0)
        if me == line.get("src", 0):
            dist.send(mine(0, shape), line.get("dst", 0), group=group, tag=tag)
        elif me == line.get("dst", 0):
            out = zero(shape)
            src = None if op == "recv_any" else line.get("src", 0)
            dist.recv(out, src, group=group, tag=tag)
            return [out]
        return None
    if op == "barrier":
        dist.barrier(group=group)
        return None
    raise ValueError("unknown op " + op)


def without_libuv():
    """Debian's PyTorch 2.6 has no libuv, and asks for it where it does not look
    at USE_LIBUV: in torchrun, and in ranks under its agent."""
    dist.TCPStore = functools.partial(dist.TCPStore, use_libuv=False)
    sys.modules["torch.distributed.rendezvous"].TCPStore = dist.TCPStore


def main():
    if os.environ.get("USE_LIBUV") == "0":
        without_libuv()
    if sys.argv[1] == "--torchrun":
        del sys.argv[1]
        runpy.run_module("torch.distributed.run", run_name="__main__")
        return
    seconds = float(os.environ.get("SCRIPT_TIMEOUT", "60"))
    with open(sys.argv[1]) as f:
        lines = [json.loads(s) for s in f if s.strip() and not s.lstrip().startswith("#")]
    meet = {}
    if len(sys.argv) > 2:
        meet = {"init_method": sys.argv[2], "rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=seconds), **meet)
    groups = {"": dist.group.WORLD}
    for i, line in enumerate(lines):
        result = {"i": i, "op": line["op"], "rank": dist.get_rank()}
        try:
            out = run(line, groups)
            result["sha256"] = digest(out) if out is not None else ""
        except Exception as e:  # what PyTorch cannot do it says in many types
            result["sha256"], result["error"] = "", (str(e).splitlines() or [""])[0] or repr(e)
            if BROKEN.search(str(e)):
                print(json.dumps(result), flush=True)
                raise
        print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # threads of gloo may abort a process that takes its leave


if __name__ == "__main__":
    try:
        main()
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)  # threads of gloo may keep a process from its leave
