"""A PyTorch rank that meets the others once, says so, and then either sleeps
(peer.py sleep) or waits for the other of two in a receive (peer.py wait) and
prints how that ended. Not in an operation that sends: gloo can miss there that
the connection was closed, and then waits for its timeout."""
import datetime
import os
import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=180))
dist.barrier()
print("in", flush=True)
if sys.argv[1] == "sleep":
    time.sleep(600)
try:
    dist.recv(torch.zeros(1), 1 - dist.get_rank())
    print("done", flush=True)
except RuntimeError as e:
    print(e, flush=True)
    os._exit(0)  # a thread of gloo that loses its connections may abort a process that takes its leave
