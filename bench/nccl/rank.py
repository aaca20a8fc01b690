"""A rank of PyTorch: it does the operations of a script, or times all_reduces."""
import hashlib, json, os, sys, time
import torch, torch.distributed as dist

rank, size, local = (int(os.environ[k]) for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
where = torch.device("cuda", local)
torch.cuda.set_device(where)
eager = {"device_id": where} if os.environ["BARS_TEST_MODE"] == "eager" else {}
dist.init_process_group("nccl", **eager)


def values(k, r, n, dtype, j=0):
    i = torch.arange(n, dtype=torch.int64)
    v = (i * 7 + r * 13 + k * 29 + j * 5) % 17
    if dtype == "bool":
        return (v % 2 == 1).to(where)
    if not dtype.startswith(("float", "bfloat")):
        return (v % 3).to(getattr(torch, dtype)).to(where)
    return ((v - 8).double() * 0.125).to(getattr(torch, dtype)).to(where)


def reduction(o):
    if o["reduce"] == "premul":
        return dist._make_nccl_premul_sum(0.5)
    return {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "product": dist.ReduceOp.PRODUCT}[o["reduce"]]


def digest(tensors):
    h = hashlib.sha256()
    for t in tensors:
        h.update(t.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return h.hexdigest()[:16]


def do(k, o):
    n, root, dtype, sizes = o["n"], o["root"], o["dtype"], o["sizes"]
    v = lambda m, j=0: values(k, rank, m, dtype, j)
    name = o["op"]
    if name == "all_reduce":
        t = v(n); dist.all_reduce(t, reduction(o)); return [t]
    if name == "broadcast":
        t = v(n); dist.broadcast(t, root); return [t]
    if name == "reduce":
        t = v(n); dist.reduce(t, root, reduction(o)); return [t] if rank == root else []
    if name == "all_gather":
        out = [v(n, 1) for _ in range(size)]; dist.all_gather(out, v(n)); return out
    if name == "all_gather_uneven":
        out = [v(m, 1) for m in sizes]; dist.all_gather(out, v(sizes[rank])); return out
    if name == "all_gather_into_tensor":
        out = v(n * size, 1); dist.all_gather_into_tensor(out, v(n)); return [out]
    if name == "reduce_scatter":
        out = v(n, 1); dist.reduce_scatter(out, [v(n, j) for j in range(size)], reduction(o)); return [out]
    if name == "reduce_scatter_uneven":
        out = v(sizes[rank], 1); dist.reduce_scatter(out, [v(m, j) for j, m in enumerate(sizes)], reduction(o)); return [out]
    if name == "reduce_scatter_tensor":
        out = v(n, 1); dist.reduce_scatter_tensor(out, v(n * size), reduction(o)); return [out]
    if name == "all_to_all_single":
        out = v(sizes[rank] * size, 1)
        dist.all_to_all_single(out, v(sum(sizes)), [sizes[rank]] * size, sizes); return [out]
    if name == "gather":
        out = [v(n, 1) for _ in range(size)] if rank == root else None
        dist.gather(v(n), out, root); return out or []
    if name == "scatter":
        out = v(n, 1); dist.scatter(out, [v(n, j) for j in range(size)] if rank == root else None, root); return [out]
    if name == "send_recv":
        to, t = (root + 1) % size, v(n)
        if size > 1 and rank == root: dist.send(t, to)
        elif size > 1 and rank == to: dist.recv(t, root)
        return [t]
    if name == "batch":
        out = v(n, 1)
        for w in dist.batch_isend_irecv([dist.P2POp(dist.isend, v(n), (rank + 1) % size), dist.P2POp(dist.irecv, out, (rank - 1) % size)]): w.wait()
        return [out]
    if name == "barrier":
        dist.barrier(); return []
    g = dist.new_group(o["ranks"])
    t = v(n)
    if rank in o["ranks"]: dist.all_reduce(t, group=g)
    return [t]


if os.environ["BARS_TEST_ROLE"] == "script":
    for k, o in enumerate(json.load(open(os.path.join(os.environ["BARS_TEST_DIR"], "script.json")))):
        print(k, o["op"], o["dtype"], digest(do(k, o)), flush=True)
elif os.environ["BARS_TEST_ROLE"] == "split":
    for lists in ([list(range(i, size, 2)) for i in range(2)], [list(range(size))]):
        t = torch.full((1,), rank + 1.0, device=where)
        dist.all_reduce(t, group=dist.split_group(split_ranks=lists))
        print("split", len(lists), t.item(), flush=True)
else:
    for power in range(2, 31, 4):
        t = torch.zeros((1 << power) // 4, device=where)
        calls = 200 if power < 24 else 20
        for how in ("queued", "graph"):
            def row():
                for _ in range(calls): dist.all_reduce(t)
            row(); torch.cuda.synchronize()
            graph = None
            if how == "graph":
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph): row()
                graph.replay(); torch.cuda.synchronize()
            times = []
            for _ in range(5):
                dist.barrier(); torch.cuda.synchronize()
                begun = time.perf_counter()
                graph.replay() if graph else row()
                issued = time.perf_counter()
                torch.cuda.synchronize()
                times.append((time.perf_counter() - begun, issued - begun))
            whole, host = sorted(times)[2]
            if rank == 0: print("time", how, 1 << power, host / calls * 1e6, whole / calls * 1e6, flush=True)
dist.barrier()
torch.cuda.synchronize()
time.sleep(1)
os._exit(0)
