#!/usr/bin/env python3
"""PyTorch's DistributedDataParallel, measured as BenchmarkStep of examples/ddp measures this library.

  ddp_step.py --cases "128,64/16 512x5 1024x9 2048x9" > nccl.jsonl
  ddp_step.py --kernels examples/internal/gpumlp/kernels.ptx --cases 1024x9 > same.jsonl
  ddp_step.py --device cpu --backend gloo --cases 128,64/16 --steps 40
  ddp_step.py --table ours.jsonl nccl.jsonl same.jsonl

Starts its own ranks on this host and trains the demo's model, one record a case. A case has the sizes
of the hidden layers with commas; 1024x9 means nine layers of 1024, and /16 at the end buckets of
16 KiB. Without that the first bucket has 1 MiB and others 25 MiB, which are DDP's defaults.

Steps with an exchange of gradients and steps in no_sync come in rounds. A time is that from the loss of
one step to that of the next. The exposed communication is the difference of the medians.

All is float32, without TF32. With --kernels the passes are kernels of a PTX file, the demo's own, and
only the exchange and the optimizer are PyTorch's. --table reads records and prints a table in Markdown.
"""
import argparse
import contextlib
import ctypes
import json
import os
import sys
import time

from ranks import run

ROUND = 20  # measured steps of a kind in a round; as in examples/ddp/step_test.go
WARM_UP = 20
IMAGES, FEATURES, CLASSES = 1438, 64, 10  # of the demo's digits


def parse_case(name):
    """Returns the sizes of the layers, and the limit of a bucket in MiB or None."""
    layers, _, kib = name.partition("/")
    hidden = []
    for group in layers.split(","):
        size, _, times = group.partition("x")
        hidden += [int(size)] * int(times or 1)
    return [FEATURES] + hidden + [CLASSES], int(kib) / 1024 if kib else None


def perceptron(torch, sizes):
    """Returns the model with PyTorch's kernels: images and labels to the mean loss."""
    nn, layers = torch.nn, []
    for i, (size, out) in enumerate(zip(sizes, sizes[1:])):
        layers += [nn.Tanh()] if i else []
        layers.append(nn.Linear(size, out))

    class Perceptron(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*layers)
            self.loss = nn.CrossEntropyLoss()

        def forward(self, images, labels):
            return self.loss(self.layers(images), labels)
    return Perceptron()


class Kernels:
    """The kernels of package gpumlp, launched on PyTorch's current stream."""

    def __init__(self, torch, file):
        self.torch = torch
        self.cuda = ctypes.CDLL("libcuda.so.1")
        torch.zeros(1, device="cuda")  # makes the context
        self.context, module = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(self.cuda.cuCtxGetCurrent(ctypes.byref(self.context)))
        with open(file, "rb") as f:
            self.check(self.cuda.cuModuleLoadData(ctypes.byref(module), f.read() + b"\0"))
        self.functions = {}
        for name in "linear", "softmax", "param_grad", "input_grad":
            function = ctypes.c_void_p()
            self.check(self.cuda.cuModuleGetFunction(ctypes.byref(function), module, b"c10d_mlp_" + name.encode()))
            self.functions[name] = function

    def check(self, code):
        if code:
            raise RuntimeError("CUDA driver error %d" % code)

    def launch(self, name, elements, *args):
        """Runs a kernel. Integers are 32 bits, tensors and None are pointers."""
        values = []
        for a in args:
            if isinstance(a, float):
                values.append(ctypes.c_float(a))
            elif isinstance(a, int):
                values.append(ctypes.c_uint32(a))
            else:
                values.append(ctypes.c_void_p(0 if a is None else a.data_ptr()))
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
        self.check(self.cuda.cuCtxSetCurrent(self.context))  # autograd's thread may have none
        grid = min((elements - 1) // 256 + 1, 1 << 16)
        stream = ctypes.c_void_p(self.torch.cuda.current_stream().cuda_stream)
        self.check(self.cuda.cuLaunchKernel(self.functions[name], grid, 1, 1, 256, 1, 1, 0, stream, pointers, None))


def perceptron_of(torch, sizes, kernels):
    """Is perceptron with Kernels. What autograd calls the gradient of a layer's output is the derivative by
    the sum before tanh, as in package gpumlp."""
    nn, new = torch.nn, torch.empty

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, bias, weight, x, tanh):
            (n, size), out = x.shape, weight.shape[1]
            y = new(n, out, device=x.device)
            kernels.launch("linear", n * out, y, x, weight, bias, n, size, out, int(tanh))
            ctx.save_for_backward(weight, x)
            return y

        @staticmethod
        def backward(ctx, delta):
            weight, x = ctx.saved_tensors
            (n, size), out = x.shape, weight.shape[1]
            w, b = new(size, out, device=x.device), new(out, device=x.device)
            kernels.launch("param_grad", (size + 1) * out, w, b, x, delta, n, size, out)
            dx = None
            if ctx.needs_input_grad[2]:
                dx = new(n, size, device=x.device)
                kernels.launch("input_grad", n * size, dx, x, weight, delta, n, size, out)
            return b, w, dx, None

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y, labels):
            n, classes = y.shape
            loss, right = new(n, dtype=torch.float64, device=y.device), new(n, dtype=torch.int32, device=y.device)
            delta = torch.empty_like(y)
            kernels.launch("softmax", n, loss, right, delta, y, labels, n, classes, 1.0 / n)
            ctx.save_for_backward(delta)
            return loss

        @staticmethod
        def backward(ctx, _):
            return ctx.saved_tensors[0], None

    class Perceptron(nn.Module):
        def __init__(self):
            super().__init__()
            for i, (size, out) in enumerate(zip(sizes, sizes[1:])):
                bound = (3 / size) ** 0.5
                self.register_parameter("weight%d" % i, nn.Parameter((2 * torch.rand(size, out) - 1) * bound))
                self.register_parameter("bias%d" % i, nn.Parameter(torch.zeros(out)))

        def forward(self, x, labels):
            for i in range(len(sizes) - 1):
                x = Layer.apply(getattr(self, "bias%d" % i), getattr(self, "weight%d" % i), x, i < len(sizes) - 2)
            return Loss.apply(x, labels)  # of each image
    return Perceptron()


class Trainer:
    """One rank's model, data and optimizer."""

    def __init__(self, args, torch, device, rank, name):
        self.args, self.torch, self.device, self.rank = args, torch, device, rank
        sizes, cap = parse_case(name)
        torch.manual_seed(1)
        if args.kernels:
            model = perceptron_of(torch, sizes, Kernels(torch, args.kernels))
        else:
            model = perceptron(torch, sizes)
        self.gpu = device.type == "cuda"
        self.batch = args.batch // args.world
        self.model = torch.nn.parallel.DistributedDataParallel(
            model.to(device), device_ids=[device.index] if self.gpu else None, bucket_cap_mb=cap,
            find_unused_parameters=False, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        # Half of the pixels of an image are paper.
        self.images = torch.relu(torch.rand(IMAGES, FEATURES) - 0.5)
        kind = torch.uint8 if args.kernels else torch.int64
        self.labels = torch.randint(CLASSES, (IMAGES,)).to(kind)
        self.order = torch.randperm(IMAGES)

        def pinned(shape, dtype):
            return torch.zeros(shape, dtype=dtype, pin_memory=self.gpu)
        self.host_images, self.host_labels = pinned((self.batch, FEATURES), torch.float32), pinned((self.batch,), kind)
        self.host_loss = pinned((self.batch,), torch.float64) if args.kernels else pinned((), torch.float32)
        self.next = 0

    def step(self, exchange):
        """Takes a training step and returns the loss, for which it waits as the demo does: the loss is copied after
        the forward pass, and the CPU waits for that copy when it has enqueued the rest."""
        torch = self.torch
        begin = self.next * self.args.batch % (IMAGES // self.args.batch * self.args.batch)
        self.next += 1
        mine = self.order[begin + self.rank:begin + self.args.batch:self.args.world][:self.batch]
        torch.index_select(self.images, 0, mine, out=self.host_images)
        torch.index_select(self.labels, 0, mine, out=self.host_labels)
        images = self.host_images.to(self.device, non_blocking=True)
        labels = self.host_labels.to(self.device, non_blocking=True)
        self.optimizer.zero_grad(set_to_none=True)
        with contextlib.nullcontext() if exchange else self.model.no_sync():
            loss = self.model(images, labels)
            if self.gpu and self.args.wait == "forward":
                self.host_loss.copy_(loss.detach(), non_blocking=True)
                passed = torch.cuda.Event()
                passed.record()
            loss.backward(torch.ones_like(loss) if loss.dim() else None)
        self.optimizer.step()
        if self.gpu and self.args.wait == "forward":
            passed.synchronize()
            return float(self.host_loss.sum())
        return loss.detach().sum().item()

    def steps(self, dist, exchange, n):
        """Returns n times in microseconds. The ranks begin together."""
        if self.gpu:
            self.torch.cuda.synchronize(self.device)
        dist.barrier()
        if self.gpu:
            self.torch.cuda.synchronize(self.device)
        times, last = [], 0.0
        for k in range(n + 1):
            self.step(exchange)
            now = time.perf_counter()
            if k > 0:
                times.append((now - last) * 1e6)
            last = now
        return times

    def buckets(self):
        """Returns the bytes of the rebuilt buckets, None if DDP does not tell."""
        try:
            text = self.model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
            return [int(n) for n in text.replace(",", " ").split()]
        except (AttributeError, KeyError, ValueError):
            return None


def median(times):
    return sorted(times)[len(times) // 2]


def measure(args, torch, dist, device, rank, name):
    """Prints the record of a case on rank 0."""
    t = Trainer(args, torch, device, rank, name)
    t.steps(dist, True, WARM_UP)
    t.steps(dist, False, WARM_UP)
    rounds = max(args.steps // ROUND, 1)
    times, medians = {True: [], False: []}, {True: [], False: []}
    for r in range(rounds):
        for k in range(2):
            exchange = (r + k) % 2 == 0
            some = t.steps(dist, exchange, ROUND)
            times[exchange] += some
            medians[exchange].append(median(some))
    mine = [median(times[True]), median(times[False])] + medians[True] + medians[False]
    slowest = torch.tensor(mine, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    slowest = slowest.tolist()
    if rank != 0:
        return
    exposed = sorted(a - b for a, b in zip(slowest[2:2 + rounds], slowest[2 + rounds:]))
    print(json.dumps({
        "system": "torch-" + args.backend + ("-kernels" if args.kernels else ""), "version": torch.__version__, "op": "ddp_step", "case": name,
        "dtype": "float32", "size": sum(p.numel() * 4 for p in t.model.parameters()), "world": args.world, "batch": t.batch,
        "buckets": t.buckets(), "iters": len(times[True]), "repeat": rounds,
        "time_us_with": slowest[0], "time_us_alone": slowest[1], "time_us_exposed": slowest[0] - slowest[1],
        "time_us_exposed_p25": exposed[rounds // 4], "time_us_exposed_p75": exposed[rounds * 3 // 4],
        "device": args.device, "gpus": min(args.world, torch.cuda.device_count()) if t.gpu else 0,
        "gpu": torch.cuda.get_device_name(device) if t.gpu else ""}), flush=True)


def rank_main(args, rank, rendezvous):
    import torch
    import torch.distributed as dist
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if args.device == "cuda":
        if not torch.cuda.is_available():
            sys.exit("ddp_step.py: PyTorch %s sees no GPU" % torch.__version__)
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group(args.backend, init_method="file://" + rendezvous, rank=rank, world_size=args.world)
    for name in args.cases.split():
        measure(args, torch, dist, device, rank, name)
    dist.barrier()
    dist.destroy_process_group()


def digits(n):
    """Writes a number with about three digits."""
    return "%.0f" % n if abs(n) >= 100 else "%.3g" % n


def table(files):
    """Prints a row for each case: the first file's system, then the others beside it."""
    systems, cases, records = [], [], {}
    for file in files:
        with open(file) as lines:
            for line in lines:
                r = json.loads(line)
                if r["system"] not in systems:
                    systems.append(r["system"])
                if r["case"] not in cases:
                    cases.append(r["case"])
                records[r["case"], r["system"]] = r
    names = {"c10d-go": "here", "torch-nccl": "PyTorch", "torch-gloo": "PyTorch gloo", "torch-nccl-kernels": "PyTorch, these kernels"}
    head = ["case", "gradients", "buckets"]
    for k, s in enumerate(systems):
        head += [names.get(s, s) + ": with", "alone", "exposed"] + (["ratio"] if k else [])
    print("| " + " | ".join(head) + " |")
    print("| " + " | ".join(["---"] * len(head)) + " |")
    notes = []
    for case in cases:
        ours = records.get((case, systems[0]))
        first = next(records[case, s] for s in systems if (case, s) in records)
        count = len(first["buckets"] or [])
        cells = ["`%s`" % case, digits(first["size"] / 1024) + " KiB" if first["size"] < 1 << 20 else digits(first["size"] / (1 << 20)) + " MiB", str(count)]
        for k, s in enumerate(systems):
            r = records.get((case, s))
            if r is None:
                cells += [""] * (4 if k else 3)
                continue
            exposed = tuple(digits(r["time_us_exposed" + q]) for q in ("", "_p25", "_p75"))
            cells += [digits(r["time_us_with"]), digits(r["time_us_alone"]), "%s (%s to %s)" % exposed]
            if k:
                both = ours and r["time_us_exposed"] > 0 and ours["time_us_exposed"] > 0
                cells.append("%.2f" % (ours["time_us_exposed"] / r["time_us_exposed"]) if both else "")
            if r["buckets"] is None or len(r["buckets"]) != count:
                notes.append("%s has other buckets in case %s: %s" % (s, case, r["buckets"]))
        print("| " + " | ".join(cells) + " |")
    for note in notes:
        print(note, file=sys.stderr)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--world", type=int, default=2)
    p.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    p.add_argument("--backend", choices=["gloo", "nccl"], default="nccl")
    p.add_argument("--cases", default="128,64/16 512x5 1024x9 2048x9", help="list of cases")
    p.add_argument("--steps", type=int, default=300, help="measured steps of each kind")
    p.add_argument("--batch", type=int, default=64, help="images in a step, of all ranks together")
    p.add_argument("--wait", choices=["forward", "item"], default="forward",
                   help="what a step waits for: the loss after the forward pass, as the demo does, or loss.item() at its end")
    p.add_argument("--kernels", help="PTX file with the demo's kernels")
    p.add_argument("--table", nargs="+", metavar="FILE", help="print a table of these records, and measure nothing")
    args = p.parse_args()
    if args.table:
        return table(args.table)
    if args.backend == "nccl" and args.device != "cuda" or args.kernels and args.device != "cuda":
        p.error("NCCL and --kernels need --device cuda")
    if args.batch % args.world:
        p.error("--batch %d is no multiple of %d ranks" % (args.batch, args.world))
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    try:
        import torch.distributed  # once, for all ranks; it starts no CUDA and no thread that they would miss
    except ImportError as e:
        sys.exit("ddp_step.py: %s has no PyTorch: %s" % (sys.executable, e))
    assert torch.distributed.is_available()
    sys.exit(0 if run(args, rank_main) else 1)


if __name__ == "__main__":
    main()
