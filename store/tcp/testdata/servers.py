"""For each line on standard input, starts a TCPStore server and prints its port."""
import datetime
import sys

import torch.distributed as dist

stores = []
for _ in sys.stdin:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False,
                          timeout=datetime.timedelta(seconds=60))
    stores.append(store)
    print(store.port, flush=True)
