#!/usr/bin/env python3
"""Trains a perceptron on the digits and sends its parameters to the Go server.

    trainer.py [--server HOST:PORT] [--epochs N] [--checkpoint FILE] ...

After every epoch, and whenever the server asks for it, the parameters go out
over a gloo process group of two: the server is rank 0, the trainer rank 1. The
training does not depend on the server: without one it goes on, and looks for
one again after every epoch. It prints a JSON object for everything that happens.

PyTorch 1.13 and later, nothing else.
"""
import argparse
import csv
import datetime
import gzip
import json
import os
import socket
import sys
import time
import zlib

import torch
import torch.distributed as dist

DIGITS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "internal", "dataset", "digits.csv.gz")
SERVER_RANK, TRAINER_RANK = 0, 1
GOODBYE, UPDATE = 0, 1


def say(event, **what):
    print(json.dumps({"event": event, **what}), flush=True)


class Link:
    """The way to the server. While there is none, sending does nothing."""

    def __init__(self, address, timeout):
        host, port = address.rsplit(":", 1)
        self.host, self.port = host.strip("[]"), int(port)
        self.timeout = datetime.timedelta(seconds=timeout)
        self.store = None
        self.wanted = 0
        self.refused = None

    def connect(self, model):
        """Looks for a server, unless there is one already."""
        if self.store is not None or self.refused:
            return
        try:
            # The store's own constructor would wait for a server to come.
            socket.create_connection((self.host, self.port), timeout=2).close()
        except OSError as e:
            say("no server", why=str(e))
            return
        try:
            store = self._open()
            number = store.add("trainers", 1)
            store.set("trainer/%d" % number, json.dumps({
                "torch": torch.__version__,
                "parameters": [{"name": n, "shape": list(p.shape)} for n, p in model.named_parameters()],
            }))
            answer = store.get("answer/%d" % number).decode()
            if answer != "ok":
                self.refused = answer
                say("refused", why=answer)
                return
            self.wanted = store.add("wanted", 0)
            dist.init_process_group("gloo", store=dist.PrefixStore("group/%d" % number, store),
                                    rank=TRAINER_RANK, world_size=2, timeout=self.timeout)
        except RuntimeError as e:
            self.drop(e, "no server")
            return
        self.store = store
        say("connected", number=number, torch=torch.__version__)

    def _open(self):
        where = dict(host_name=self.host, port=self.port, is_master=False, timeout=self.timeout)
        try:
            # libuv is a matter of PyTorch's own server, but without this the
            # client asks for it, too, and fails in a PyTorch that lacks it.
            return dist.TCPStore(**where, use_libuv=False)
        except TypeError:  # before PyTorch 2.2
            return dist.TCPStore(**where)

    def drop(self, why, event="lost the server"):
        say(event, why=str(why).splitlines()[0])
        if dist.is_initialized():
            dist.destroy_process_group()
        self.store = None

    def asked(self):
        """Whether the server has asked for a set since the last call."""
        if self.store is None:
            return False
        try:
            wanted = self.store.add("wanted", 0)
        except RuntimeError as e:
            self.drop(e)
            return False
        before, self.wanted = self.wanted, wanted
        return wanted > before

    def send(self, model, version, epoch, accuracy):
        """Sends all parameters, and returns their checksum if the server has them."""
        if self.store is None:
            return None
        parameters = [p.detach().cpu().contiguous() for p in model.parameters()]
        crc = 0
        for p in parameters:
            crc = zlib.crc32(p.numpy().tobytes(), crc)
        if self._broadcast([UPDATE, version, epoch, round(accuracy * 1e6), crc], parameters):
            return crc
        return None

    def goodbye(self):
        if self.store is not None:
            self._broadcast([GOODBYE, 0, 0, 0, 0], [])

    def _broadcast(self, header, parameters):
        try:
            works = [dist.broadcast(t, src=TRAINER_RANK, async_op=True) for t in [torch.tensor(header)] + parameters]
            for w in works:
                w.wait()
        except RuntimeError as e:
            self.drop(e)
            return False
        return True


def digits(path):
    """Returns the images and labels for training, and those held out: every fifth."""
    with gzip.open(path, "rt") as f:
        rows = torch.tensor([[int(v) for v in row] for row in csv.reader(f)])
    held_out = torch.arange(len(rows)) % 5 == 4
    images, labels = rows[:, :-1].float() / 16, rows[:, -1]
    return images[~held_out], labels[~held_out], images[held_out], labels[held_out]


def main():
    a = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    a.add_argument("--server", default="127.0.0.1:29400", help="the server's -store")
    a.add_argument("--epochs", type=int, default=60)
    a.add_argument("--pause", type=float, default=0, help="seconds between epochs, to have time to watch")
    a.add_argument("--checkpoint", help="file to go on from, if it is there, and to save to after every epoch")
    a.add_argument("--hidden", type=int, default=64, help="size of the hidden layer")
    a.add_argument("--seed", type=int, default=1)
    a.add_argument("--timeout", type=float, default=30, help="the longest time to wait for the server, in seconds")
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

    link = Link(o.server, o.timeout)

    def send():
        with torch.no_grad():
            out = model(held_images)
        accuracy = (out.argmax(1) == held_labels).float().mean().item()
        crc = link.send(model, step, epoch, accuracy)
        if crc is not None:
            # The probabilities for one image let a test compare the server's with ours.
            say("sent", epoch=epoch, version=step, accuracy=accuracy, crc32=crc, probe=out[0].softmax(0).tolist())

    link.connect(model)
    while epoch < o.epochs:
        for batch in torch.randperm(len(images)).split(32):
            loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if link.asked():
                send()
        epoch += 1
        link.connect(model)
        send()
        if o.checkpoint:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                        "epoch": epoch, "step": step}, o.checkpoint + ".new")
            os.replace(o.checkpoint + ".new", o.checkpoint)
        time.sleep(o.pause)
    link.goodbye()
    say("done", epoch=epoch)
    os._exit(0)  # threads of gloo may abort a process that takes its leave


if __name__ == "__main__":
    try:
        main()
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)  # threads of gloo may keep a process from its leave
