"""A PyTorch rank of TestMismatchWithPyTorch: mismatch.py RANK SIZE PORT SHAPES.
Prints what DistributedDataParallel says to parameters of these shapes."""
import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

rank, size, port, shapes = map(json.loads, sys.argv[1:])
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, timeout=timedelta(seconds=90))
model = torch.nn.Module()
for i, shape in enumerate(shapes):
    model.register_parameter(f"p{i}", torch.nn.Parameter(torch.zeros(shape)))
try:
    DDP(model)
    print("constructed", flush=True)
except RuntimeError as e:
    print(e, flush=True)
os._exit(0)  # a thread of gloo that loses its connections may abort or keep a process that takes its leave
