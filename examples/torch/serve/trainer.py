#!/usr/bin/env python3
"""Trains a perceptron on the digits and publishes its parameters to Go servers.

    trainer.py [--listen HOST:PORT] [--epochs N] [--checkpoint FILE] ...

After every epoch all servers that are connected get the parameters; one that
connects later gets those of the last epoch. The training does not depend on
servers. It prints a JSON object for everything that happens.

PyTorch 1.13 and later, and weights_publisher.py, which is one file.
"""
import argparse
import csv
import gzip
import json
import os
import sys
import time

import torch

HERE = os.path.dirname(os.path.abspath(__file__))
DIGITS = os.path.join(HERE, "..", "..", "internal", "dataset", "digits.csv.gz")
sys.path.insert(0, os.path.join(HERE, "..", "..", "..", "weights", "torch"))
from weights_publisher import Publisher


def say(event, **what):
    print(json.dumps({"event": event, **what}), flush=True)


def digits(path):
    """Returns the images and labels for training, and those held out: every fifth."""
    with gzip.open(path, "rt") as f:
        rows = torch.tensor([[int(v) for v in row] for row in csv.reader(f)])
    held_out = torch.arange(len(rows)) % 5 == 4
    images, labels = rows[:, :-1].float() / 16, rows[:, -1]
    return images[~held_out], labels[~held_out], images[held_out], labels[held_out]


def main():
    a = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    a.add_argument("--listen", default="127.0.0.1:29400", help="HOST:PORT for servers")
    a.add_argument("--epochs", type=int, default=60)
    a.add_argument("--pause", type=float, default=0, help="seconds between epochs, to have time to watch")
    a.add_argument("--checkpoint", help="file to go on from, if it is there, and to save to after every epoch")
    a.add_argument("--hidden", type=int, default=64, help="size of the hidden layer")
    a.add_argument("--seed", type=int, default=1)
    a.add_argument("--timeout", type=float, default=30, help="seconds after which a server that takes no data is dropped")
    a.add_argument("--data", default=DIGITS, help="the digits, if this file is not in its repository")
    o = a.parse_args()

    torch.manual_seed(o.seed)
    images, labels, held_images, held_labels = digits(o.data)
    model = torch.nn.Sequential(torch.nn.Linear(64, o.hidden), torch.nn.Tanh(), torch.nn.Linear(o.hidden, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    epoch = step = 0
    if o.checkpoint and os.path.exists(o.checkpoint):
        state = torch.load(o.checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        epoch, step = state["epoch"], state["step"]
        say("resumed", epoch=epoch)

    host, port = o.listen.rsplit(":", 1)
    publisher = Publisher(host.strip("[]"), int(port), timeout=o.timeout)
    say("listening", address="%s:%d" % publisher.address[:2])
    while epoch < o.epochs:
        for batch in torch.randperm(len(images)).split(32):
            loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
        epoch += 1
        with torch.no_grad():
            out = model(held_images)
        accuracy = (out.argmax(1) == held_labels).float().mean().item()
        # One more tensor, so that this and the parameters are one version.
        about = torch.tensor([os.getpid(), epoch, round(accuracy * 1e6), int(time.time() * 1000)])
        servers, _ = publisher.publish(step, [*model.named_parameters(), ("about", about)])
        dropped, publisher.dropped = publisher.dropped, []
        for name, why in dropped:
            say("dropped", server=name, why=why)
        # The probabilities for one image let a test compare the server's with ours.
        say("published", epoch=epoch, version=step, accuracy=accuracy, servers=servers, probe=out[0].softmax(0).tolist())
        if o.checkpoint:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                        "epoch": epoch, "step": step}, o.checkpoint + ".new")
            os.replace(o.checkpoint + ".new", o.checkpoint)
        time.sleep(o.pause)
    publisher.close()
    say("done", epoch=epoch)


if __name__ == "__main__":
    main()
