"""A PyTorch rank between two Go ranks: torch_rank.py STORE_FILE RANK FIRST SECOND

FIRST and SECOND are the Go ranks; see torch_test.go for their side.
"""
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

path, me, a, b = sys.argv[1], *map(int, sys.argv[2:])
dist.init_process_group("gloo", store=dist.FileStore(path, 3), rank=me, world_size=3,
                        timeout=timedelta(seconds=120))
for n in (0, 1, 1000, 3000000):
    for peer in (a, b):
        x = torch.arange(n, dtype=torch.float32) + peer
        dist.send(x, peer, tag=n + 5)
        y = torch.empty(n)
        dist.recv(y, peer, tag=n + 6)
        assert torch.equal(x, y), (n, peer)

seen = []
for i in range(2):
    y = torch.empty(1)
    seen.append((dist.recv(y, tag=1), int(y)))
assert sorted(seen) == sorted([(a, a), (b, b)]), seen

dist.barrier()

# The second rank says goodbye and leaves; the first one goes on.
y = torch.empty(1)
dist.recv(y, a, tag=2)
dist.send(y, a, tag=3)

# Then the first one aborts under a receive that is pending here.
try:
    dist.recv(y, a, tag=4)
except RuntimeError as e:
    print("OK", str(e).splitlines()[0], flush=True)
    os._exit(0)  # a thread of gloo that loses its connections may abort a process that takes its leave
else:
    sys.exit("the receive succeeded")
