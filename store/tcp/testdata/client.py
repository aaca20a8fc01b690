"""Works as a client of the TCPStore server on the given port."""
import datetime
import sys
import threading

import torch.distributed as dist

port = int(sys.argv[1])


def client(**more):
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=120), **more)


def times_out(store, key):
    # The time-out stays that of the store's later calls, which must succeed.
    try:
        store.wait([key], datetime.timedelta(seconds=5))
    except RuntimeError:
        return True


a = client(wait_for_workers=False)
b = client(world_size=2)
assert a.num_keys() == 1

a.set("k", "hello")
assert a.get("k") == b"hello"
a.set("empty", "")
assert a.get("empty") == b""
a.set("", "x")
assert b.get("") == b"x"
assert a.add("n", 5) == 5
assert b.add("n", -7) == -2
assert a.get("n") == b"-2"
assert a.compare_set("cs", "", "new") == b"new"
assert a.compare_set("cs2", "exp", "new") == b"exp"
assert b.compare_set("cs", "new", "n2") == b"n2"
assert a.compare_set("cs", "wrong", "n3") == b"n2"
assert a.num_keys() == 6
assert a.delete_key("k") is True
assert b.delete_key("k") is False
big = "B" * (8 << 20)
a.set("big", big)
assert b.get("big") == big.encode()
a.wait([])

timer = threading.Timer(0.1, lambda: b.set("late", "v"))
timer.start()
a.wait(["late", "big"])
timer.join()

# PyTorch's own server answers a wait that was given up, and so spoils this.
assert times_out(a, "never")
assert a.num_keys() == 7
b.set("never", "1")
assert b.num_keys() == 8  # until here the set may still be under way
assert a.num_keys() == 8
assert a.get("never") == b"1"

# From and to Go.
a.set("from python", "\u00e9")
assert a.get("from go") == b"\x00\xff"
print("done")
