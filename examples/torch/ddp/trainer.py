#!/usr/bin/env python3
"""A Python rank of a job in which Python and Go ranks train one model.

An ordinary PyTorch program, which does not know that there are Go ranks. The first line
of the standard input is the job: the data and the schedule, as JSON. RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT are the environment's, as under torchrun. The output is the
result. The program ends when the standard input does.
"""
import base64
import datetime
import hashlib
import json
import os
import sys
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Centre(nn.Module):
    """Takes the mean of the images seen so far from each image. Its buffers
    are what DistributedDataParallel gives every rank from rank 0."""

    def __init__(self, features):
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        y = x - self.mean
        if self.training and len(x) > 0:
            self.mean += 0.1 * (x.mean(0) - self.mean)
            self.batches += 1
        return y


def network(sizes):
    layers = [Centre(sizes[0])]
    for n, m in zip(sizes, sizes[1:]):
        layers += [nn.Linear(n, m), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def floats(encoded):
    return torch.frombuffer(bytearray(base64.b64decode(encoded)), dtype=torch.float32)


def labels(encoded):
    return torch.frombuffer(bytearray(base64.b64decode(encoded)), dtype=torch.uint8).long()


def raw(t):
    return t.detach().contiguous().numpy().tobytes()


def end_with_input():
    def wait():
        sys.stdin.read()
        os._exit(4)

    threading.Thread(target=wait, daemon=True).start()


def train(job):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=job["timeout"]))
    rank, ranks = dist.get_rank(), dist.get_world_size()

    sizes = list(job["sizes"])
    if rank == job["odd_rank"]:
        sizes[1] += 1
    torch.manual_seed(1000 + rank)  # rank 0's parameters must win
    net = network(sizes)
    if rank == 0 != job["odd_rank"]:
        flat = floats(job["initial"])
        with torch.no_grad():
            for p in net.parameters():
                p.copy_(flat[:p.numel()].view_as(p))
                flat = flat[p.numel():]

    dist._DEFAULT_FIRST_BUCKET_BYTES = job["bucket_kib"] << 10
    model = DistributedDataParallel(net, bucket_cap_mb=job["bucket_kib"] / 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=job["rate"], momentum=job["momentum"])

    features = sizes[0]
    images, answers = floats(job["images"]).view(-1, features), labels(job["labels"])
    held, held_answers = floats(job["held_out_images"]).view(-1, features), labels(job["held_out_labels"])
    gradients = hashlib.sha256()
    for epoch, order in enumerate(job["orders"]):
        model.train()
        total = torch.zeros(2, dtype=torch.float64)
        for begin in range(0, len(order), job["batch"]):
            end = min(begin + job["batch"], len(order))
            mine = [order[i] for i in range(begin, end) if i % ranks == rank]
            x, y = images[mine], answers[mine]
            # The average over the ranks is the gradient of the mean over the global batch.
            loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
            optimizer.zero_grad()
            (loss * (ranks / (end - begin))).backward()
            for p in model.parameters():
                gradients.update(raw(p.grad))
            optimizer.step()
            total[0] += loss.item()
        model.eval()
        with torch.no_grad():
            right = model(held[rank::ranks]).argmax(1) == held_answers[rank::ranks]
        total[1] = right.sum()
        dist.all_reduce(total)
        loss, accuracy = total[0].item() / len(order), total[1].item() / len(held)
        if rank == 0:
            print(f"epoch {epoch + 1}/{len(job['orders'])}  loss {loss:.4f}  held-out accuracy {100 * accuracy:.2f}%", file=sys.stderr, flush=True)

    buckets = model._get_ddp_logging_data().get("rebuilt_bucket_sizes") or ""
    print(json.dumps({
        "rank": rank, "kind": "python", "torch": torch.__version__, "loss": loss, "accuracy": accuracy,
        "gradients": gradients.hexdigest(),
        "buffers": hashlib.sha256(b"".join(map(raw, model.buffers()))).hexdigest(),
        "params": base64.b64encode(b"".join(map(raw, model.parameters()))).decode(),
        "buckets": [int(b) for b in buckets.split(",") if b.strip()],
    }), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # threads of gloo may abort a process that takes its leave


if __name__ == "__main__":
    job = json.loads(sys.stdin.readline())
    end_with_input()
    try:
        train(job)
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)  # threads of gloo may keep a process from its leave
