"""Is a client of the TCPStore server on the given port, and silent until told to go on."""
import datetime
import sys

import torch.distributed as dist

store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, wait_for_workers=False, timeout=datetime.timedelta(seconds=120))
store.set("k", "hello")
print("silent", flush=True)
sys.stdin.readline()
assert store.get("k") == b"hello"
print("done", flush=True)
