#!/usr/bin/env python3
"""PyTorch's gloo backend, measured as `c10d bench -json` measures this library.

  torch_gloo.py --world 2 --op all_reduce --sizes 4,1K,64K,1M > gloo.jsonl

Starts its own ranks on this host. Ranks run the operation back to back; an
iteration's time is the slowest rank's; the best of the repetitions is kept.
"""
import argparse
import json
import os
import socket
import subprocess
import sys
import time


def size_of(text):
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper())
    return int(text[:-1]) * scale if scale else int(text)


def issue(dist, torch, op, dtype, size, world, rank):
    """Returns bytes as nccl-tests counts them, the bus factor, steps a call, and the call."""
    es = torch.zeros(1, dtype=dtype).element_size()
    whole = max(size // es, 1)
    part = max(whole // world, 1)
    shared = (world - 1) / world

    def zeros(n):
        return torch.zeros(n, dtype=dtype)

    if op == "all_reduce":
        t = zeros(whole)
        return whole * es, 2 * shared, 1, lambda: dist.all_reduce(t)
    if op == "reduce":
        t = zeros(whole)
        return whole * es, 1, 1, lambda: dist.reduce(t, 0)
    if op == "broadcast":
        t, root = zeros(whole), [world - 1]

        def call():
            root[0] = (root[0] + 1) % world
            dist.broadcast(t, root[0])
        return whole * es, 1, 1, call
    if op == "all_gather_into_tensor":
        # 1.13 has no such call for gloo; its list form moves the same bytes.
        t, out = zeros(part), [zeros(part) for _ in range(world)]
        return part * world * es, shared, 1, lambda: dist.all_gather(out, t)
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
    if op == "send_recv":
        t = zeros(whole)

        def call():
            if rank == 0:
                dist.send(t, 1)
                dist.recv(t, 1)
            elif rank == 1:
                dist.recv(t, 0)
                dist.send(t, 0)
        return whole * es, 1, 2, call
    if op == "barrier":
        return 0, 1, 1, dist.barrier
    sys.exit("torch_gloo.py: unknown op " + op)


def rank_main(args, rank):
    import torch
    import torch.distributed as dist
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=args.world)
    dtype = getattr(torch, args.dtype)
    for text in args.sizes.split(","):
        size = size_of(text)
        nbytes, bus, steps, call = issue(dist, torch, args.op, dtype, size, args.world, rank)
        start = time.perf_counter()
        for _ in range(5):
            call()
        each = (time.perf_counter() - start) / 5
        n = torch.tensor([min(max(int(args.budget / max(each, 1e-6)), 10), 20000)])
        dist.broadcast(n, 0)
        best, worst = None, 0.0
        for _ in range(args.repeat):
            dist.barrier()
            stamps, begin = [], time.perf_counter()
            last = begin
            for _ in range(int(n)):
                call()
                now = time.perf_counter()
                stamps.append(now - last)
                last = now
            t = torch.tensor(stamps + [last - begin], dtype=torch.float64)
            dist.all_reduce(t, dist.ReduceOp.MAX)
            times = sorted(t[:-1].tolist())
            p50 = times[len(times) // 2] * 1e6 / steps
            worst = max(worst, p50)
            if best is None or p50 < best[0]:
                best = (p50, times[len(times) * 99 // 100] * 1e6 / steps, float(t[-1]) * 1e6 / steps / len(times))
        if rank == 0:
            algbw = nbytes / best[0] / 1e3
            print(json.dumps({
                "system": "torch-gloo", "version": torch.__version__, "op": args.op, "dtype": args.dtype, "size": size,
                "world": args.world, "bytes": nbytes, "iters": int(n), "repeat": args.repeat, "time_us_p50": best[0],
                "time_us_p99": best[1], "time_us_avg": best[2], "p50_spread": worst / best[0],
                "algbw_GBps": algbw, "busbw_GBps": algbw * bus}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--world", type=int, default=2)
    p.add_argument("--op", default="all_reduce")
    p.add_argument("--dtype", default="float32")
    p.add_argument("--sizes", default="4,1K,64K,1M,16M")
    p.add_argument("--repeat", type=int, default=3)
    p.add_argument("--budget", type=float, default=0.5, help="seconds for one measurement of one size")
    args = p.parse_args()
    if "BENCH_RANK" in os.environ:
        rank_main(args, int(os.environ["BENCH_RANK"]))
        return
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    env = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    ranks = [subprocess.Popen([sys.executable] + sys.argv, env=dict(env, BENCH_RANK=str(r))) for r in range(args.world)]
    sys.exit(max(r.wait() for r in ranks))


if __name__ == "__main__":
    main()
