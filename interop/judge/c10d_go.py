"""A process group of c10d for Go as a torch.distributed.ProcessGroup, for CPU tensors.

It is for PyTorch's own tests: ctypes over libc10dgo.so, no C++, no ABI of PyTorch or Python. PyTorch 1.13 and 2.x. Rank 0
hosts a store of this library and writes its address to PyTorch's store, so every store of PyTorch does.
"""
import array
import collections
import ctypes
import os
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

LIBRARY = None  # the file; load() reads it at the first group, since a process that forks must not have Go's threads
WIRE = ""       # of gloo.Options; with "tcp" each process is a host
DETAIL = False  # compares calls, whatever PyTorch's debug level
_lib = None
_i64, _int, _text = ctypes.c_int64, ctypes.c_int, ctypes.c_char_p
_ROOM = 4096
_thread = threading.local()
_once = threading.Lock()


def load():
    global _lib
    with _once:
        if _lib is None:
            lib = ctypes.CDLL(LIBRARY)
            for name, arguments in dict(
                serve=(_text, _int), new=(_text, _text, _text, _text, _int, _int, _int, _i64, _text, _int),
                close=(_i64, _i64), call=(_i64, _text, _text, _text, _int, _text, _int), monitored=(_i64, _i64, _text, _int),
                wait=(_i64, _i64, _text, _int), done=(_i64,), source=(_i64,), entries=(_i64,) * 4, free=(_i64,),
            ).items():
                f = getattr(lib, "c10dgo_" + name)
                f.argtypes, f.restype = arguments, None if name in ("close", "free") else _i64
            _lib = lib
    return _lib


def _checked(f, *args):
    """Calls a function that may fail, and returns its result."""
    if not hasattr(_thread, "room"):
        _thread.room = ctypes.create_string_buffer(_ROOM)
    n = f(*args, _thread.room, _ROOM)
    if n < 0:
        raise RuntimeError(_thread.room.value.decode("utf-8", "replace"))
    return n


def _codes():
    names = ("uint8 int8 int16 int32 int64 float16 float32 float64 - complex64 complex128 bool - - - bfloat16 "
             "- - - - - - - float8_e5m2 float8_e4m3fn - - uint16 uint32 uint64")
    return {getattr(torch, n): i for i, n in enumerate(names.split()) if hasattr(torch, n)}


_CODES = _codes()
_OPS = [n for n in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR") if hasattr(dist.ReduceOp, n)]


def _name(op):
    """The library's name of a ReduceOp."""
    for n in _OPS:
        if op == getattr(dist.ReduceOp, n):
            return n.lower()
    raise RuntimeError("unsupported reduction operation %s" % op)


def _millis(t):
    """Milliseconds of a timeout; 0, for none, also for PyTorch's value that stands for none."""
    return max(int(t.total_seconds() * 1000), 0) if isinstance(t, timedelta) else 0


def _describe(out, t, keep):
    """Appends what lib.go reads as a tensor. keep gets what has to live as long as the operation."""
    if t.device.type != "cpu":
        raise RuntimeError("unsupported device type %s" % t.device)
    if t.dtype not in _CODES:
        raise RuntimeError("Invalid scalar type: %s" % t.dtype)
    out.append(t.dim())
    out.extend(t.shape)
    if t.layout == torch.strided:
        out.extend((0, _CODES[t.dtype], t.data_ptr()))
        out.extend(t.stride())
        return
    out.append(1)
    for part in (t._indices().contiguous(), t._values().contiguous()):
        keep.append(part)
        _describe(out, part, keep)


class GoWork(getattr(dist, "_Work", None) or dist.Work):
    def __init__(self, group, handle, name, keep, result):
        super().__init__()
        self._group, self._handle, self._name, self._keep, self._result = group, handle, name, keep, result
        self._lock, self._error, self._future, self._source = threading.Lock(), None, None, -1

    def _end(self):
        """Waits, and notes how the operation ended. Who waits holds the lock, so that the handle lives as long."""
        with self._lock:
            if not self._handle:
                return
            try:
                _checked(_lib.c10dgo_wait, self._handle, 0)
                if self._name in ("recv", "recv_any"):
                    self._source = _lib.c10dgo_source(self._handle)
                self._take_sparse()
            except Exception as e:
                self._error = e
            _lib.c10dgo_free(self._handle)
            self._handle = self._keep = None
        self._group._ended(self)

    def _take_sparse(self):
        for i, t in enumerate(t for t in self._result if self._name == "all_reduce" and t.layout == torch.sparse_coo):
            n = _lib.c10dgo_entries(self._handle, i, 0, 0)
            indices = torch.empty((t.sparse_dim(), n), dtype=torch.int64)
            values = torch.empty((n,) + tuple(t.shape[t.sparse_dim():]), dtype=t.dtype)
            _lib.c10dgo_entries(self._handle, i, indices.data_ptr(), values.data_ptr())
            t.copy_(torch.sparse_coo_tensor(indices, values, t.shape)._coalesced_(True))

    def wait(self, timeout=None):
        limit = _millis(timeout)
        if limit:
            if not self._lock.acquire(timeout=limit / 1000):
                raise RuntimeError("Timed out after %d ms of waiting" % limit)
            try:
                if self._handle:
                    _checked(_lib.c10dgo_wait, self._handle, limit)
            except RuntimeError:
                if not _lib.c10dgo_done(self._handle):
                    raise  # the waiting has ended, the operation has not
            finally:
                self._lock.release()
        self._end()
        if self._error:
            raise self._error
        return True

    def synchronize(self):
        self.wait()

    def is_completed(self):
        if not self._lock.acquire(blocking=False):
            return False  # another thread waits
        try:
            if self._handle and not _lib.c10dgo_done(self._handle):
                return False
        finally:
            self._lock.release()
        self._end()
        return True

    def is_success(self):
        return self.is_completed() and self._error is None

    def exception(self):
        return self._error

    def result(self):
        return self._result

    def source_rank(self):
        return self._source

    _source_rank = source_rank

    def get_future(self):
        if self._future is None:
            self._future = torch.futures.Future()
            # A thread of its own, since functions after one future may wait for another.
            threading.Thread(target=self._complete, daemon=True).start()
        return self._future

    def _complete(self):
        self._end()
        if self._error:
            self._future.set_exception(self._error)
        else:
            self._future.set_result(self._result)


class ProcessGroupGo(dist.ProcessGroup):
    _made = 0

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        lib = load()
        self._pid, self._seq, self._group, self._limit = os.getpid(), 0, 0, _millis(timeout)
        self._running = set()  # works whose memory is in use
        # C++ may call a work once more after its wait, and must then find its Python half.
        self._recent = collections.deque(maxlen=64)
        if rank == 0:
            room = ctypes.create_string_buffer(256)
            if lib.c10dgo_serve(room, 256):
                raise RuntimeError(room.value.decode())
            ProcessGroupGo._made += 1
            store.set("c10dgo", room.value + b" %d" % ProcessGroupGo._made)
        address, prefix = bytes(store.get("c10dgo")).split()
        host = "host%d" % self._pid if WIRE == "tcp" else ""
        detail = DETAIL or dist.get_debug_level() == dist.DebugLevel.DETAIL
        self._group = _checked(lib.c10dgo_new, address, prefix, WIRE.encode(), host.encode(), rank, size, detail, self._limit)

    # Life. PyTorch asks for the names.

    def shutdown(self):
        group, self._group = self._group, 0
        if group and self._pid == os.getpid():
            _lib.c10dgo_close(group, 5000)

    def __del__(self):
        self.shutdown()

    def getBackendName(self):
        return "c10d_go"  # C++ takes a group of the name gloo for its own class

    def name(self):
        return "gloo"

    def setGroupName(self, name):
        self._called = name

    _set_group_name = setGroupName

    def getGroupName(self):
        return self._called

    @property
    def group_name(self):
        return self._called

    def _get_backend_name(self):
        return "c10d_go"

    def _get_backend(self, device=None):
        return self

    def _set_sequence_number_for_group(self):
        pass

    def _get_sequence_number_for_group(self):
        return self._seq

    # Calls

    def _ended(self, work):
        self._recent.append(work)
        self._running.discard(work)

    def _call(self, name, out, into=(), opts=None, op=None, root=0, tag=0, splits=((), ()), result=None):
        if self._pid != os.getpid():
            raise RuntimeError("this process has forked, and the group belongs to process %d" % self._pid)
        if not self._group:
            raise RuntimeError("the group is closed")
        keep = [out, into]
        args = [root, tag, _millis(getattr(opts, "timeout", None))]
        for tensors in (out, into):
            args.append(len(tensors))
            for t in tensors:
                _describe(args, t, keep)
        for part in splits:
            args.append(len(part))
            args.extend(part)
        operator = b"" if op is None else _name(op).encode()
        packed = array.array("q", args).tobytes()
        handle = _checked(_lib.c10dgo_call, self._group, name.encode(), operator, packed, len(args))
        self._seq += name not in ("send", "recv", "recv_any")
        work = GoWork(self, handle, name, keep, list(out) if result is None else result)
        self._running.add(work)
        return work

    def allreduce(self, tensors, opts=None, op=None):
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        if opts is not None and not hasattr(opts, "reduceOp"):
            opts, op = None, opts
        return self._call("all_reduce", tensors, opts=opts, op=_op(opts, op), result=tensors)

    def allreduce_coalesced(self, tensors, opts=None):
        return self._call("all_reduce_coalesced", tensors, opts=opts, op=_op(opts), result=tensors)

    def broadcast(self, tensors, opts=None, root=None):
        if isinstance(tensors, torch.Tensor):
            return self._call("broadcast", [tensors], root=opts if root is None else root)
        opts = opts or dist.BroadcastOptions()
        return self._call("broadcast", tensors, opts=opts, root=opts.rootRank, tag=opts.rootTensor, result=tensors)

    def reduce(self, tensors, opts=None, root=None, op=None):
        if isinstance(tensors, torch.Tensor):
            return self._call("reduce", [tensors], root=opts if root is None else root, op=_op(None, op))
        opts = opts or dist.ReduceOptions()
        if opts.rootTensor != 0:
            raise RuntimeError("reduce: invalid root tensor: %d" % opts.rootTensor)
        return self._call("reduce", tensors, opts=opts, root=opts.rootRank, op=opts.reduceOp)

    def allgather(self, outs, ins, opts=None):
        if isinstance(ins, torch.Tensor):
            outs, ins = [outs], [ins]
        _same_length(outs, ins)
        want = len(ins) * self.size()
        for i, out in enumerate(outs):
            if len(out) != want:
                raise RuntimeError("allgather: invalid output tensor list at index %d (expected length %d, got %d)" % (i, want, len(out)))
        if len(ins) == 1:
            uneven = any(t.shape != outs[0][0].shape for t in outs[0])
            return self._call("all_gather_v" if uneven else "all_gather", outs[0], ins, opts, result=list(outs[0]))
        work = self._call("all_gather_coalesced", outs[0], ins, opts, result=outs)
        work.wait()  # lists after the first are copies of it
        for out in outs[1:]:
            for to, t in zip(out, outs[0]):
                to.copy_(t)
        return work

    def allgather_coalesced(self, outs, ins, opts=None):
        flat = [t for out in outs for t in out]
        return self._call("all_gather_coalesced", flat, ins, opts)

    def _allgather_base(self, out, t, opts=None):
        return self._call("all_gather_into_tensor", [out], [t], opts)

    all_gather_into_tensor = _allgather_base

    def allgather_into_tensor_coalesced(self, outs, ins, opts=None):
        return self._call("all_gather_into_tensor_coalesced", outs, ins, opts)

    def gather(self, outs, ins, opts=None, root=None):
        if isinstance(ins, torch.Tensor):
            outs, ins, root = [outs] if outs else [], [ins], opts if root is None else root
        if root is None:
            opts = opts or dist.GatherOptions()
            root = opts.rootRank
        return self._call("gather", _on_root("gather", outs, root == self.rank(), self.size()), ins, opts, root=root)

    def scatter(self, outs, ins, opts=None, root=None):
        if isinstance(outs, torch.Tensor):
            outs, ins, root = [outs], [ins] if ins else [], opts if root is None else root
        if root is None:
            opts = opts or dist.ScatterOptions()
            root = opts.rootRank
        return self._call("scatter", outs, _on_root("scatter", ins, root == self.rank(), self.size()), opts, root=root)

    def reduce_scatter(self, outs, ins, opts=None, op=None):
        if isinstance(outs, torch.Tensor):
            outs, ins = [outs], [ins]
        if opts is not None and not hasattr(opts, "reduceOp"):
            opts, op = None, opts
        _same_length(outs, ins)
        return self._call("reduce_scatter", outs, ins[0], opts, op=_op(opts, op))

    def _reduce_scatter_base(self, out, t, opts=None):
        return self._call("reduce_scatter_tensor", [out], [t], opts, op=_op(opts))

    reduce_scatter_tensor = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outs, ins, opts=None):
        return self._call("reduce_scatter_tensor_coalesced", outs, ins, opts, op=_op(opts))

    def alltoall_base(self, out, t, out_splits, in_splits, opts=None):
        return self._call("all_to_all_single", [out], [t], opts, splits=(out_splits, in_splits))

    def alltoall(self, outs, ins, opts=None):
        return self._call("all_to_all", outs, ins, opts)

    def send(self, tensors, dst, tag=0):
        return self._call("send", tensors, root=dst, tag=tag)

    def recv(self, tensors, src, tag=0):
        return self._call("recv", tensors, root=src, tag=tag)

    def recv_anysource(self, tensors, tag=0):
        return self._call("recv_any", tensors, tag=tag)

    def barrier(self, opts=None):
        if getattr(opts, "device_ids", None):
            raise RuntimeError("barrier: device_ids are not supported")
        return self._call("barrier", [], opts=opts)

    def monitored_barrier(self, timeout=None, wait_all_ranks=False):
        # 0 is the group's timeout in Go, and no time at all in PyTorch.
        limit = max(_millis(timeout), 1) if timeout is not None else self._limit
        _checked(_lib.c10dgo_monitored, self._group, limit)


def _op(opts, op=None):
    if opts is not None:
        return opts.reduceOp
    return dist.ReduceOp.SUM if op is None else op


def _same_length(outs, ins):
    if len(ins) == 0:
        raise RuntimeError("requires non-empty input tensor list")
    if len(outs) != len(ins):
        raise RuntimeError("requires input/output tensor lists to have the same length")


def _on_root(name, lists, here, size):
    """The list of a root, empty elsewhere. c10d has a list of one list."""
    if here != (len(lists) == 1):
        raise RuntimeError("%s: requires %s list" % (name, "a single-element" if here else "an empty"))
    if here and len(lists[0]) != size:
        raise RuntimeError("%s: the list has %d tensors for %d ranks" % (name, len(lists[0]), size))
    return lists[0] if here else []
