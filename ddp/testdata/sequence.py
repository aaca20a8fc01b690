"""Prints, as JSON, the collectives of torch's DistributedDataParallel in the
scenarios of TestSequenceOfCollectives: {scenario: [[calls of a step], ...]}.
Started once for each rank: sequence.py RANK STOREFILE."""
import json
import os
import sys
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

rank, path = int(sys.argv[1]), sys.argv[2]
calls = []
ops = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.MAX: "max"}


def show(t):
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}".replace(",", "")


class Recorder(dist.ProcessGroup):
    def __init__(self, inner):
        super().__init__(inner.rank(), inner.size())
        self.inner = inner

    def allreduce(self, ts, opts=None):
        opts = opts or dist.AllreduceOptions()
        ts = ts if isinstance(ts, list) else [ts]
        calls.append(f"all_reduce {show(ts[0])} {ops[opts.reduceOp]}")
        return self.inner.allreduce(ts, opts)

    def broadcast(self, ts, opts=None):
        opts = opts or dist.BroadcastOptions()
        ts = ts if isinstance(ts, list) else [ts]
        calls.append(f"broadcast {show(ts[0])} from {opts.rootRank}")
        return self.inner.broadcast(ts, opts)

    def allgather(self, outs, ins, opts=None):
        calls.append(f"all_gather {show(ins[0])}")
        return self.inner.allgather(outs, ins, opts or dist.AllgatherOptions())

    def getBackendName(self):
        return "recorder"


def make(prefix_store, rank, size, timeout):
    return Recorder(dist.ProcessGroupGloo(prefix_store, rank, size, timeout))


dist.Backend.register_backend("recorder", make)
dist.init_process_group("recorder", init_method="file://" + path, rank=rank, world_size=2, timeout=timedelta(seconds=60))


class Model(torch.nn.Module):
    def __init__(self, shapes, frozen=False, buffers=()):
        super().__init__()
        for i, (n, dtype) in enumerate(shapes):
            setattr(self, f"p{i}", torch.nn.Parameter(torch.zeros(n, dtype=dtype)))
        self.n = len(shapes)
        if frozen:
            self.frozen = torch.nn.Parameter(torch.zeros(7), requires_grad=False)
        for k, v in buffers:
            self.register_buffer(k, v)

    def forward(self, x):
        for i in range(self.n):
            x = x * getattr(self, f"p{i}").sum().float()
        return x


def ddp(shapes, frozen=False, buffers=(), **options):
    dist._DEFAULT_FIRST_BUCKET_BYTES = 40
    return DDP(Model(shapes, frozen, buffers), bucket_cap_mb=100.5 / (1 << 20), **options)


def step(model, context=nullcontext):
    with context():
        model(torch.ones(1, requires_grad=True)).backward()


def take():
    global calls
    out, calls = calls, []
    return out


out = {}
f, d = torch.float32, torch.float64
take()

m = ddp([(10, f), (5, d), (20, f), (4, f)], True, [("mean", torch.zeros(3)), ("steps", torch.zeros((), dtype=torch.int64))])
s = [take()]
for context in [nullcontext, nullcontext, nullcontext, m.no_sync, m.no_sync, nullcontext, nullcontext]:
    step(m, context)
    s.append(take())
out["default"] = s

for name, options in [("find unused", {"find_unused_parameters": True}), ("static graph", {"static_graph": True})]:
    m = ddp([(10, f), (10, f), (20, f), (4, f)], **options)
    s = [take()]
    for _ in range(3):
        step(m)
        s.append(take())
    out[name] = s

m = ddp([(10, f), (10, f), (20, f), (4, f)], False, [("mean", torch.zeros(3))])
s = [take()]
for evaluate in [True, False, True, False, False, True, True, False]:
    if evaluate:
        with torch.no_grad():
            m(torch.ones(1))
    else:
        step(m)
    s.append(take())
out["evaluation"] = s

m = ddp([(10, f), (20, f)], False, [("mean", torch.zeros(3))])
s = [take()]
with m.join():
    for _ in range(1 + rank):
        step(m)
s.append(take())
out["join"] = s

m = ddp([(10, f), (20, f)])
s = [take()]
try:
    with m.join(throw_on_early_termination=True):
        for _ in range(1 + rank):
            step(m)
except RuntimeError:
    s.append(take())
out["early end"] = s

print(json.dumps(out, indent=1), flush=True)
os._exit(0)  # threads of gloo may abort a process that takes its leave
