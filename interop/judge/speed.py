"""speed.py LIBRARY FILE: times of all_reduce among two ranks, with gloo and with this library in turn.

FILE is for PyTorch's store. Prints JSON: medians of rounds, in microseconds.
"""
import json
import os
import statistics
import sys
import time
from datetime import timedelta

os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
import torch
import torch.distributed as dist

import c10d_go

ROUNDS = 7


def rank(number):
    c10d_go.LIBRARY = sys.argv[1]
    store = dist.FileStore(sys.argv[2], 2)
    limit = timedelta(minutes=5)
    groups = {
        "Gloo": dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), number, 2, timeout=limit),
        "Go": c10d_go.ProcessGroupGo(dist.PrefixStore("go", store), number, 2, limit),
    }
    rows = []
    for size, calls in (4, 1000), (1 << 10, 1000), (64 << 10, 300), (1 << 20, 50), (16 << 20, 5):
        t, times = torch.zeros(size // 4), {name: [] for name in groups}
        for round in range(ROUNDS + 1):
            for name, group in groups.items():
                begun = time.perf_counter()
                for _ in range(calls):
                    group.allreduce([t]).wait()
                if round:  # the first warms up
                    times[name].append((time.perf_counter() - begun) / calls * 1e6)
        rows.append(dict({name: statistics.median(v) for name, v in times.items()}, Bytes=size))
    groups["Go"].barrier().wait()
    groups["Go"].shutdown()
    return rows


if __name__ == "__main__":
    # Gloo's threads must not be forked.
    child = os.fork()
    rows = rank(0 if child else 1)
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    print(json.dumps(rows))
