#!/usr/bin/env python3
"""A PyTorch rank of a job in which Python and Go ranks train one model.

An ordinary PyTorch program, which does not know that there are Go ranks. RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT are the environment's, as under torchrun.
"""
import csv
import gzip
import hashlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH, RATE, MOMENTUM, BUCKET = 64, 0.1, 0.9, 16 << 10
SIZES = [64, 128, 64, 10]
DIGITS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../internal/dataset/digits.csv.gz")


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


def network():
    layers = [Centre(SIZES[0])]
    for n, m in zip(SIZES, SIZES[1:]):
        layers += [nn.Linear(n, m), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def digits():
    with gzip.open(DIGITS, "rt") as f:
        rows = torch.tensor([[int(v) for v in row] for row in csv.reader(f)])
    images, labels = rows[:, :-1].float() / 16, rows[:, -1]
    held = torch.arange(len(rows)) % 5 == 4
    return images[~held], labels[~held], images[held], labels[held]


def digest(*parts):
    return hashlib.sha256(b"".join(p if isinstance(p, bytes) else p.detach().contiguous().numpy().tobytes() for p in parts)).digest()


def train(epochs):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # rank 0's parameters win
    dist._DEFAULT_FIRST_BUCKET_BYTES = BUCKET
    model = DistributedDataParallel(network(), bucket_cap_mb=BUCKET / (1 << 20))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)

    images, answers, held, held_answers = digits()
    n, gradients = len(images), b""
    for epoch in range(epochs):
        model.train()
        total = torch.zeros(2, dtype=torch.float64)
        for begin in range(0, n, BATCH):
            end = min(begin + BATCH, n)
            mine = [(389 * i + 97 * epoch) % n for i in range(begin, end) if i % ranks == rank]
            # The average over the ranks is the gradient of the mean over the global batch.
            loss = nn.functional.cross_entropy(model(images[mine]), answers[mine], reduction="sum")
            optimizer.zero_grad()
            (loss * (ranks / (end - begin))).backward()
            gradients = digest(gradients, *(p.grad for p in model.parameters()))
            optimizer.step()
            total[0] += loss.item()
        model.eval()
        with torch.no_grad():
            right = model(held[rank::ranks]).argmax(1) == held_answers[rank::ranks]
        total[1] = right.sum()
        dist.all_reduce(total)
        if rank == 0:
            loss, accuracy = total[0].item() / n, total[1].item() / len(held)
            print(f"epoch {epoch + 1}/{epochs}  loss {loss:.4f}  held-out accuracy {100 * accuracy:.2f}%", flush=True)

    buckets = model._get_ddp_logging_data().get("rebuilt_bucket_sizes") or ""
    print("buckets of [%s] bytes; gradients %s, buffers %s, parameters %s" % (
        " ".join(b.strip() for b in buckets.split(",")), gradients.hex()[:16], digest(*model.buffers()).hex()[:16], digest(*model.parameters()).hex()[:16]), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        train(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)  # threads of gloo may keep a process from its leave
    os._exit(0)  # threads of gloo may abort a process that takes its leave
