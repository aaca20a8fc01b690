"""judge.py JSON: runs cases of PyTorch's tests. The Go program judge starts it.

The argument has
  suite     the module of the tests
  impl      "gloo", or "go": a group of this library takes gloo's place
  wire      for c10d_go.WIRE; "detail" is shared memory with TORCH_DISTRIBUTED_DEBUG=DETAIL
  library   libc10dgo.so
  c10d      the program whose "c10d store" serves test_store
  tests     folders of PyTorch's tests that are not installed
  limit     seconds of a case
  texts     a file for texts of errors that differ
It prints a line of JSON that lists the cases. Then it reads names of cases, one a line, runs each, and prints a line about it.
"""
import atexit
import collections
import contextlib
import json
import os
import re
import subprocess
import sys
import time
import traceback
import types
import unittest

cfg = json.loads(sys.argv[1])
sys.argv[1:] = []
answers = os.fdopen(os.dup(1), "w")  # what tests print goes to stderr
os.dup2(2, 1)
sys.path[:0] = [os.path.dirname(os.path.abspath(__file__))] + cfg["tests"]
os.environ.update(
    WORLD_SIZE="3", BACKEND="gloo", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1", USE_LIBUV="0",
    TORCH_DISTRIBUTED_DEBUG="DETAIL" if cfg["wire"] == "detail" else "OFF")
try:
    import expecttest  # noqa: F401, Debian 12 has none
except ImportError:
    sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase, ACCEPT=False)

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.testing._internal import common_distributed, common_utils

torch.set_num_threads(1)
go = cfg["impl"] == "go"

# Processes are forked, in a tenth of the time of new ones.
common_distributed.MultiProcessTestCase._spawn_processes = lambda self: self._start_processes(
    torch.multiprocessing.get_context("fork").Process)
common_distributed.get_timeout = lambda test: cfg["limit"]
try:  # PyTorch 1.13's cannot be imported under Python 3.11
    import torch.nn.parallel._replicated_tensor_ddp_utils as replicated
    replicated._set_ddp_with_replicated_tensor = lambda value: None
except ImportError:
    pass


def put_in_place():
    """Puts this library's group in the place of gloo's."""
    from datetime import timedelta

    import c10d_go
    c10d_go.LIBRARY = cfg["library"]
    c10d_go.WIRE = "" if cfg["wire"] == "detail" else cfg["wire"]
    gloo = c10d.ProcessGroupGloo

    class ProcessGroupGloo(c10d_go.ProcessGroupGo):
        _Options = gloo._Options
        create_device = gloo.create_device
        create_default_device = getattr(gloo, "create_default_device", None)

        def __init__(self, store, rank, size, options=None, timeout=None):
            if timeout is None and options is not None:
                timeout = options if isinstance(options, timedelta) else options._timeout
            super().__init__(store, rank, size, timeout or timedelta(minutes=30))

    c10d.ProcessGroupGloo = dist.ProcessGroupGloo = ProcessGroupGloo
    # Go ranks compare their calls themselves.
    c10d._create_process_group_wrapper = lambda wrapped_pg, *args, **names: wrapped_pg

    # all_to_all is tested for MPI alone.
    name = next(n for n in ("sandcastle_skip_if", "skip_but_pass_in_sandcastle_if") if hasattr(common_utils, n))
    skip_if = getattr(common_utils, name)
    setattr(common_utils, name, lambda condition, why: skip_if(condition and "Only MPI supports" not in why, why))


@contextlib.contextmanager
def other_text(test, exception, pattern, seen):
    """The right type of error is enough for the case to go on. A text that differs is noted."""
    try:
        yield seen
    except exception as e:
        seen.exception = e
        pattern = getattr(pattern, "pattern", pattern)
        if not re.search(pattern, str(e)):
            note(test.id(), pattern, str(e))
    else:
        raise AssertionError("%s not raised, wanted %r" % (exception, pattern))


def note(test, want, got):
    with open(cfg["texts"], "a") as f:
        f.write(json.dumps({"want": want, "got": got[:1000]}) + "\n")


def raises_regex(self, exception, pattern, *call, **names):
    context = other_text(self, exception, pattern, types.SimpleNamespace(exception=None))
    if not call:
        return context
    with context:
        call[0](*call[1:], **names)


def serve_stores():
    """Servers of TCPStore are "c10d store". Returns a function that ends those of a case, and one that keeps those there are."""
    real, servers = dist.TCPStore, []

    def make(host_name, port, world_size=None, is_master=False, *args, **names):
        names.pop("use_libuv", None)
        if is_master and go and not names.get("multi_tenant") and not names.get("master_listen_fd"):
            server = subprocess.Popen([cfg["c10d"], "store", "-listen", "127.0.0.1:%d" % port],
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            line = server.stdout.readline()
            if not line:
                raise RuntimeError("The server socket has failed to listen on any local network address: " + server.stderr.read())
            port, is_master = int(re.search(r":(\d+)\b", line).group(1)), False
            servers.append(server)
        if torch.__version__ >= "2":
            names["use_libuv"] = False  # Debian's PyTorch has none
        return real(host_name, port, world_size, is_master, *args, **names)

    class Meta(type):
        def __instancecheck__(cls, x):
            return isinstance(x, real)

    class TCPStore(metaclass=Meta):
        def __new__(cls, *args, **names):
            return make(*args, **names)

    dist.TCPStore = common_distributed.c10d.TCPStore = TCPStore
    import torch.distributed.rendezvous as rendezvous
    rendezvous.TCPStore = TCPStore

    def end(some):
        for s in some:
            s.kill()
            s.communicate()
        some.clear()

    def keep():  # a module makes servers for all its cases while it is imported
        atexit.register(end, servers.copy())
        servers.clear()

    return lambda: end(servers), keep


def wrapped(module):
    """test_pg_wrapper looks for the wrapper, and for its texts. Here an error that says that ranks disagree will do."""
    def validate(self, exception, op_type, rank, tensor):
        note(self.id(), "%s on rank %d" % (op_type, rank), str(exception))
        self.assertIn("disagree", str(exception))
    for c in vars(module).values():
        if hasattr(c, "_validate_error"):
            c._validate_error = validate
    module.c10d._create_process_group_wrapper = c10d._create_process_group_wrapper
    module.c10d._ProcessGroupWrapper = lambda group, helper: group
    import c10d_go
    c10d_go.DETAIL = True  # some cases put a wrapper around a group under another debug level


after = lambda: None  # noqa: E731, called after each case
if go:
    put_in_place()
    unittest.TestCase.assertRaisesRegex = common_utils.TestCase.assertRaisesRegex = raises_regex
if cfg["suite"] == "distributed_test":
    from torch.testing._internal.distributed import distributed_test as module
    if go:  # gloo's own C++ reports to the profiler
        for n in ("PROFILING_SUPPORTED_BACKENDS", "CUDA_PROFILING_SUPPORTED_BACKENDS", "SEND_RECV_PROFILING_SUPPORTED_BACKENDS"):
            getattr(module, n).clear()

    class Distributed(module.TestDistBackend, module.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            self._spawn_processes()

    cases = unittest.defaultTestLoader.loadTestsFromTestCase(Distributed)
else:
    if cfg["suite"] == "test_store":
        after, keep = serve_stores()
    module = __import__(cfg["suite"])
    if cfg["suite"] == "test_store":
        keep()
    module.__dict__.pop("load_tests", None)
    if go and cfg["suite"] == "test_pg_wrapper":
        wrapped(module)
    cases = unittest.defaultTestLoader.loadTestsFromModule(module)


def flat(suite):
    for t in suite:
        if isinstance(t, unittest.TestSuite):
            yield from flat(t)
        else:
            yield t


class Result(unittest.TestResult):
    """The outcome of one case."""
    status, text = "pass", ""

    def _failed(self, test, error):
        self.status, self.text = "fail", "".join(traceback.format_exception(*error))[-6000:]

    addError = addFailure = _failed

    def addSubTest(self, test, subtest, error):
        if error:
            self._failed(test, error)

    def addSkip(self, test, why):
        if self.status == "pass":
            self.status, self.text = "skip", why

    def addUnexpectedSuccess(self, test):
        self.status, self.text = "fail", "an expected failure passed"


def answer(**fields):
    answers.write(json.dumps(fields) + "\n")
    answers.flush()


def name_of(test):
    return "%s.%s" % (type(test).__name__, test._testMethodName)


if __name__ == "__main__":
    named = collections.OrderedDict((name_of(t), t) for t in flat(cases))
    answer(cases=list(named))
    for line in sys.stdin:
        begun, result = time.time(), Result()
        open(cfg["texts"], "w").close()
        test = type(named[line.strip()])(named[line.strip()]._testMethodName)
        unittest.TestSuite([test]).run(result)
        after()
        with open(cfg["texts"]) as f:
            texts = [json.loads(line) for line in f]
        answer(case=name_of(test), status=result.status, seconds=time.time() - begun, text=result.text, texts=texts)
