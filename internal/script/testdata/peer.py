"""A PyTorch rank that meets the others once, says so, and then either sleeps
(peer.py sleep) or waits for them in an all_reduce (peer.py wait) and prints how
that ended."""
import datetime
import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
dist.barrier()
print("in", flush=True)
if sys.argv[1] == "sleep":
    time.sleep(60)
try:
    dist.all_reduce(torch.zeros(1 << 20))
    print("done", flush=True)
except RuntimeError as e:
    print(e, flush=True)
