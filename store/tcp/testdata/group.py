"""A rank of a gloo group that meets in a store which somebody else hosts."""
import datetime
import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo", init_method="env://", timeout=datetime.timedelta(seconds=120))
rank = dist.get_rank()
t = torch.tensor([float(rank + 1)])
dist.all_reduce(t)
assert t.item() == 3, t
group = dist.new_group([0, 1])
dist.all_reduce(t, group=group)
assert t.item() == 6, t
dist.barrier()
print("rank", rank, "sum", t.item(), flush=True)
os._exit(0)  # threads of gloo may abort a process that takes its leave
