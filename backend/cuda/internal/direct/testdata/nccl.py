"""NCCL through PyTorch, RANKS processes with a GPU each: us a call on the slower rank, as BenchmarkNCCL measures ours.

Prints rows: operation, dtype, bytes, in a CUDA graph, queued, one call and a wait.
"""
import os
import socket
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

IN_GRAPH = 20
RANKS = int(os.environ["RANKS"])


def slowest(us):
    t = torch.tensor([us])
    dist.all_reduce(t, op=dist.ReduceOp.MAX, group=CPU)
    return t.item()


def times(call, k):
    best = float("inf")
    for _ in range(4):
        torch.cuda.synchronize()
        dist.barrier(group=CPU)
        begin = time.perf_counter()
        for _ in range(k):
            call()
        torch.cuda.synchronize()
        best = min(best, slowest((time.perf_counter() - begin) * 1e6 / k))
    return best


def row(rank, name, dtype, n, call):
    iterations = max(min(200, (1 << 30) // n), 10)
    for _ in range(3):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(IN_GRAPH):
            call()
    in_graph = times(graph.replay, max(iterations // IN_GRAPH, 1)) / IN_GRAPH
    queued = times(call, iterations)
    dist.barrier(group=CPU)
    waits = []
    for _ in range(max(iterations, 20)):
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        waits.append((time.perf_counter() - begin) * 1e6)
    waits.sort()
    wait = slowest(waits[len(waits) // 2])
    del graph
    if rank == 0:
        print(f"{name} {dtype} {n} {in_graph:.2f} {queued:.2f} {wait:.2f}", flush=True)


def main(rank, port):
    global CPU
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(RANKS))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    CPU = dist.new_group(backend="gloo")
    sizes = [int(n) for n in os.environ["SIZES"].split()]
    if rank == 0:
        print("NCCL", ".".join(map(str, torch.cuda.nccl.version())), "PyTorch", torch.__version__, flush=True)
    for name, dtype in ("float32", torch.float32), ("bfloat16", torch.bfloat16):
        for n in sizes:
            x = torch.ones(n // dtype.itemsize, dtype=dtype, device="cuda")
            row(rank, "all_reduce", name, n, lambda: dist.all_reduce(x))
    for n in sizes:
        if n < 64 << 10:
            continue
        whole = torch.ones(n // 4, device="cuda")
        other = torch.ones(n // 4, device="cuda")
        part = torch.ones(n // 4 // RANKS, device="cuda")
        row(rank, "reduce_scatter", "float32", n, lambda: dist.reduce_scatter_tensor(part, whole))
        row(rank, "all_gather", "float32", n, lambda: dist.all_gather_into_tensor(whole, part))
        row(rank, "all_to_all", "float32", n, lambda: dist.all_to_all_single(other, whole))
        row(rank, "broadcast", "float32", n, lambda: dist.broadcast(whole, 0))
        row(rank, "reduce", "float32", n, lambda: dist.reduce(whole, 0))
    for name, dtype in ("float16", torch.float16), ("float64", torch.float64), ("int32", torch.int32), ("int8", torch.int8):
        for n in 8 << 10, 1 << 20, 64 << 20:
            x = torch.ones(n // dtype.itemsize, dtype=dtype, device="cuda")
            row(rank, "all_reduce", name, n, lambda: dist.all_reduce(x))
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(main, args=(port,), nprocs=RANKS)
