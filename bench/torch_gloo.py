#!/usr/bin/env python3
"""PyTorch's gloo or NCCL backend, or its symmetric memory, measured as `c10d bench -json` measures this library.

  torch_gloo.py --world 2 --op all_reduce,barrier --sizes 4,1K,64K,1M > gloo.jsonl
  torch_gloo.py --world 4 --device cuda --backend nccl > nccl.jsonl
  torch_gloo.py --world 2 --device cuda --backend nccl --forms calls,graph,one-shot,two-shot > nccl.jsonl
  echo 2 all_reduce 4 | torch_gloo.py --cases - > gloo.jsonl

Starts its own ranks on this host. Ranks run the operation back to back; an
iteration's time is the slowest rank's; the best of the repetitions is kept. With
--device cuda rank r has GPU r modulo their number, and an operation ends when
the GPU has done it; time_us_queued is of calls that the GPU is waited for once.
With NCCL's ranks --forms
are several systems: calls is torch-nccl; graph is torch-nccl-graph, a CUDA graph
of 20 calls, of which one is counted; one-shot and two-shot are the all_reduces of
torch.distributed._symmetric_memory (torch-symm-one-shot, torch-symm-two-shot).
With --cases each line is a world, an operation and a size; the answer is the
record and an empty line. An empty line says first that PyTorch is there.
"""
import argparse
import json
import os
import sys
import time

from ranks import run

QUEUED = 20  # calls, as many as nccl-tests makes
QUEUES = 11  # such rows, of which the median counts
SYSTEMS = {"calls": "", "graph": "torch-nccl-graph", "one-shot": "torch-symm-one-shot", "two-shot": "torch-symm-two-shot"}


def size_of(text):
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper())
    return int(text[:-1]) * scale if scale else int(text)


def issue(dist, torch, device, op, dtype, size, world, rank, tensors):
    """Returns bytes as nccl-tests counts them, the bus factor, steps a call, and the call."""
    es = torch.zeros(1, dtype=dtype).element_size()
    whole = max(size // es, 1)
    part = max(whole // world, 1)
    shared = (world - 1) / world

    def zeros(n):
        return torch.zeros(n, dtype=dtype, device=device)

    if op == "all_reduce":
        t = zeros(whole)
        return whole * es, 2 * shared, 1, lambda: dist.all_reduce(t)
    if op == "sparse_all_reduce":
        # The gradient of an embedding of 1 M x 64; rows anywhere in it, also twice.
        rows, columns = 1 << 20, 64
        n = max(size // (columns * es), 1)
        g = torch.Generator().manual_seed(rank)
        at = torch.randint(rows, (1, n), generator=g).to(device)
        values = torch.ones(n, columns, dtype=dtype, device=device)

        def call():
            # The result would replace the entries.
            dist.all_reduce(torch.sparse_coo_tensor(at, values, (rows, columns)))
        return n * columns * es, 1, 1, call
    if op == "all_reduce_coalesced":
        n = min(whole, tensors)
        t = zeros(whole)
        cut = [t[i * whole // n:(i + 1) * whole // n] for i in reversed(range(n))]
        return whole * es, 2 * shared, 1, lambda: dist.all_reduce_coalesced(cut)
    if op == "reduce":
        t = zeros(whole)
        return whole * es, 1, 1, lambda: dist.reduce(t, 0)
    if op == "broadcast":
        t, root = zeros(whole), [world - 1]

        def call():
            root[0] = (root[0] + 1) % world
            dist.broadcast(t, root[0])
        return whole * es, 1, 1, call
    if op in ("all_gather", "all_gather_into_tensor"):
        # 1.13 has not the second for gloo; the first moves the same bytes.
        t, out = zeros(part), [zeros(part) for _ in range(world)]
        return part * world * es, shared, 1, lambda: dist.all_gather(out, t)
    if op == "reduce_scatter":
        t, out = list(zeros(part * world).chunk(world)), zeros(part)
        return part * world * es, shared, 1, lambda: dist.reduce_scatter(out, t)
    if op == "reduce_scatter_tensor":
        t, out = zeros(part * world), zeros(part)
        return part * world * es, shared, 1, lambda: dist.reduce_scatter_tensor(out, t)
    if op == "all_to_all":
        t, out = list(zeros(part * world).chunk(world)), list(zeros(part * world).chunk(world))
        return part * world * es, shared, 1, lambda: dist.all_to_all(out, t)
    if op == "all_to_all_single":
        t, out = zeros(part * world), zeros(part * world)
        return part * world * es, shared, 1, lambda: dist.all_to_all_single(out, t)
    if op == "gather":
        t = zeros(part)
        out = [zeros(part) for _ in range(world)] if rank == 0 else None
        return part * world * es, shared, 1, lambda: dist.gather(t, out, 0)
    if op == "scatter":
        t = zeros(part)
        parts = [zeros(part) for _ in range(world)] if rank == 0 else None
        return part * world * es, shared, 1, lambda: dist.scatter(t, parts, 0)
    if op in ("send_recv", "recv_any"):
        t = zeros(whole)
        anyone = op == "recv_any"

        def call():
            if rank == 0:
                dist.send(t, 1)
                dist.recv(t, None if anyone else 1)
            elif rank == 1:
                dist.recv(t, None if anyone else 0)
                dist.send(t, 0)
        return whole * es, 1, 2, call
    if op == "barrier":
        return 0, 1, 1, dist.barrier
    sys.exit("torch_gloo.py: unknown op " + op)


def symmetric(dist, torch, device, form, dtype, size):
    """Is issue for an all_reduce in symmetric memory."""
    import torch.distributed._symmetric_memory as symm_mem
    group = dist.group.WORLD.group_name
    es = torch.zeros(1, dtype=dtype).element_size()
    t = symm_mem.empty(max(size // es, 1), dtype=dtype, device=device)
    symm_mem.rendezvous(t, group)
    t.zero_()
    one, two = torch.ops.symm_mem.one_shot_all_reduce, torch.ops.symm_mem.two_shot_all_reduce_
    reduce = one if form == "one-shot" else two
    return t.numel() * es, 2 * (dist.get_world_size() - 1) / dist.get_world_size(), 1, lambda: reduce(t, "sum", group)


def captured(torch, device, enqueue):
    """Returns the replay of a CUDA graph of QUEUED calls."""
    enqueue()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(QUEUED):
            enqueue()
    return graph.replay


def measure(args, dist, torch, device, op, dtype, size, rank, form):
    """Prints one record on rank 0."""
    case = {"system": SYSTEMS[form] or "torch-" + args.backend, "version": torch.__version__, "op": op, "dtype": args.dtype, "size": size,
            "world": args.world}
    gpu = device.type == "cuda"
    if gpu:
        case.update(device="cuda", gpus=min(args.world, torch.cuda.device_count()))

    def synchronize():
        if gpu:
            torch.cuda.synchronize(device)

    def agree(values, op, dtype=torch.float64):
        """The ranks' maximum or rank 0's values, whatever the backend."""
        t = torch.tensor(values, dtype=dtype, device=device)
        dist.broadcast(t, 0) if op is None else dist.all_reduce(t, op)
        return t.tolist()

    if args.backend == "nccl":
        reason = None
        if args.world > torch.cuda.device_count():
            reason = "NCCL gives no GPU to two ranks, and there are %d" % torch.cuda.device_count()
        elif op == "recv_any":
            reason = "NCCL receives from ranks that are named"
        if reason:
            if rank == 0:
                print(json.dumps(dict(case, error=reason)), flush=True)
            return

    def call():
        enqueue()
        synchronize()
    try:
        if form in ("one-shot", "two-shot"):
            nbytes, bus, steps, enqueue = symmetric(dist, torch, device, form, dtype, size)
        else:
            nbytes, bus, steps, enqueue = issue(dist, torch, device, op, dtype, size, args.world, rank, args.tensors)
        if form == "graph":
            enqueue, steps = captured(torch, device, enqueue), steps * QUEUED
        call()
    except (ImportError, AttributeError, RuntimeError, ValueError, NotImplementedError) as e:
        # Every rank is refused before anything is sent.
        if rank == 0:
            print(json.dumps(dict(case, error=str(e).split("\n")[0])), flush=True)
        return
    # The first calls connect the ranks; those of a part of the budget tell the time.
    n = 5
    for part, least in (0.1, 1), (0.2, 1), (1, 10):
        start = time.perf_counter()
        for _ in range(n):
            call()
        each = (time.perf_counter() - start) / n
        n = agree([min(max(int(part * args.budget / max(each, 1e-6)), least), 20000)], None, torch.int64)[0]
    best, worst, queued = None, 0.0, None
    for _ in range(args.repeat):
        dist.barrier()
        synchronize()
        stamps, begin = [], time.perf_counter()
        last = begin
        for _ in range(n):
            call()
            now = time.perf_counter()
            stamps.append(now - last)
            last = now
        wall = last - begin
        behinds = []
        for _ in range(QUEUES if gpu else 0):
            last = time.perf_counter()
            for _ in range(QUEUED):
                enqueue()
            synchronize()
            behinds.append((time.perf_counter() - last) / QUEUED)
        behind = sorted(behinds)[QUEUES // 2] if gpu else 0.0
        times = agree(stamps + [wall, behind], dist.ReduceOp.MAX)
        wall, behind = times[-2:]
        times = sorted(times[:-2])
        p50 = times[len(times) // 2] * 1e6 / steps
        worst = max(worst, p50)
        queued = min(queued or behind, behind)
        if best is None or p50 < best[0]:
            best = (p50, times[len(times) * 99 // 100] * 1e6 / steps, wall * 1e6 / steps / len(times))
    if op == "all_reduce_coalesced" and args.tensors != 8:
        case["tensors"] = args.tensors
    if rank == 0:
        algbw = nbytes / best[0] / 1e3
        if gpu:
            case["time_us_queued"] = queued * 1e6 / steps
        print(json.dumps(dict(
            case, bytes=nbytes, iters=n, repeat=args.repeat, time_us_p50=best[0], time_us_p99=best[1],
            time_us_avg=best[2], p50_spread=worst / best[0], algbw_GBps=algbw, busbw_GBps=algbw * bus)), flush=True)


def rank_main(args, rank, rendezvous):
    import torch
    import torch.distributed as dist
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if args.device == "cuda":
        if not torch.cuda.is_available():
            sys.exit("torch_gloo.py: PyTorch %s sees no GPU" % torch.__version__)
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(args.backend, init_method="file://" + rendezvous, rank=rank, world_size=args.world)
    dtype = getattr(torch, args.dtype)
    for op in args.op.split(","):
        for size in [0] if op == "barrier" else [size_of(text) for text in args.sizes.split(",")]:
            for form in args.forms.split(","):
                if form == "calls" or op == "all_reduce" or form == "graph" and op not in ("barrier", "send_recv", "recv_any"):
                    measure(args, dist, torch, device, op, dtype, size, rank, form)
    if args.backend == "gloo":
        dist.barrier()  # so that nobody leaves while others still read
    dist.destroy_process_group()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--world", type=int, default=2)
    p.add_argument("--op", default="all_reduce", help="operations, with commas")
    p.add_argument("--dtype", default="float32")
    p.add_argument("--sizes", default="4,1K,64K,1M,16M")
    p.add_argument("--tensors", type=int, default=8, help="tensors in a call of all_reduce_coalesced")
    p.add_argument("--repeat", type=int, default=3)
    p.add_argument("--budget", type=float, default=0.5, help="seconds for one measurement of one size")
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    p.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    p.add_argument("--forms", default="calls", help="with --backend nccl: calls, graph, one-shot and two-shot, with commas")
    p.add_argument("--cases", help="file of cases, - for standard input")
    args = p.parse_args()
    if args.backend == "nccl" and args.device != "cuda":
        p.error("NCCL needs --device cuda")
    unknown = [form for form in args.forms.split(",") if form not in SYSTEMS]
    if unknown or args.forms != "calls" and args.backend != "nccl":
        p.error("--forms is %s, want some of %s, and --backend nccl for all but calls" % (args.forms, ", ".join(SYSTEMS)))
    # One-shot and two-shot need no multicast.
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
    try:
        import torch.distributed  # once, for all ranks; it starts no CUDA and no thread that they would miss
    except ImportError as e:
        sys.exit("torch_gloo.py: %s has no PyTorch: %s" % (sys.executable, e))
    assert torch.distributed.is_available()
    if args.cases is None:
        sys.exit(0 if run(args, rank_main) else 1)
    failed = 0
    print(flush=True)
    with sys.stdin if args.cases == "-" else open(args.cases) as cases:
        for line in iter(cases.readline, ""):
            world, args.op, args.sizes = line.split()
            args.world = int(world)
            if not run(args, rank_main):
                failed = 1
            print(flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
