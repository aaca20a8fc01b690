"""A rank of PyTorch for package faults: it runs one operation again and again until it fails."""
import json, os, re, sys, threading, time
from datetime import timedelta
import torch
import torch.distributed as dist

role = json.loads(os.environ["C10D_FAULTS_ROLE"])
dist.init_process_group("gloo", timeout=timedelta(minutes=1))
rank, size = dist.get_rank(), dist.get_world_size()
limit = timedelta(seconds=role["Timeout"] / 1e9)
group = dist.new_group(timeout=limit)  # the timeout of operations
n = role["Size"] // 4
x = torch.ones(n)
each = [torch.zeros(n) for _ in range(size)]
wide = torch.zeros(n * size)


def send_recv():
    w = dist.isend(x, (rank + 1) % size, group)
    dist.recv(each[0], (rank - 1) % size, group)
    w.wait()


calls = {
    "all_reduce": lambda: dist.all_reduce(x, group=group),
    "broadcast": lambda: dist.broadcast(x, 0, group),
    "all_gather": lambda: dist.all_gather(each, x, group),
    "all_to_all_single": lambda: dist.all_to_all_single(torch.empty_like(wide), wide, group=group),
    "send_recv": send_recv,
    "barrier": lambda: dist.barrier(group),
    "monitored_barrier": lambda: dist.monitored_barrier(group, limit),
}
done, panics, said = 0, False, threading.Lock()


def report(**what):
    if said.acquire(blocking=False):  # once
        at = time.time()
        what["at"] = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at)) + ("%.6f" % (at % 1))[1:] + "Z"
        print(json.dumps(dict(what, rank=rank)), flush=True)


def watch():
    before = done
    time.sleep(2)
    report(goes_on=done > before)


def obey():
    global panics
    for line in iter(sys.stdin.readline, ""):
        if line == "panic\n":
            panics = True
        elif line == "exit\n":
            os._exit(3)
        elif line == "watch\n":
            threading.Thread(target=watch, daemon=True).start()
    os._exit(0)


dist.barrier()
print("ready", flush=True)
assert sys.stdin.readline() == "go\n"
threading.Thread(target=obey, daemon=True).start()
try:
    while True:
        calls[role["Op"]]()
        done += 1
        if panics:
            raise SystemExit("a fault of this rank")
except RuntimeError as err:
    text = str(err)
    named = re.search(r"Ranks? (\d+) failed to pass", text)  # of a monitored barrier
    report(blames="rank " + named[1] if named else "", says=text)
threading.Event().wait()
