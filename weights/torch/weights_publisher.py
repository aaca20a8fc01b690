"""Publishes the parameters of a PyTorch model to Go servers: package weights of c10d for Go.

    from weights_publisher import Publisher
    publisher = Publisher("127.0.0.1", 29600)
    ...
    publisher.publish(step, model.named_parameters())   # after a step, or every few

PyTorch 1.13 or later, nothing else. The package's documentation describes the bytes.
"""
import ctypes
import queue
import socket
import struct
import threading
import time
import zlib

import torch

HELLO, INIT, START, FULL, DELTA, FINISH, ACK, REFUSE = range(1, 9)
PROTOCOL = 1
HEADER = struct.Struct("<4s5I")
STRANGERS = 64  # connections that have not said hello yet
UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _frame(kind, payload=b"", bucket=0, count=0):
    return HEADER.pack(b"c10w", kind, bucket, count, len(payload), zlib.crc32(payload)) + payload


def _memory(t):
    """Returns the memory of a contiguous uint8 tensor, which must live longer."""
    if t.numel() == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * t.numel()).from_address(t.data_ptr())).cast("B")


def _bytes_of(t):
    """Returns the bytes of a tensor on the CPU, a view if it is contiguous there."""
    t = t.detach().cpu().contiguous()
    if t.is_complex():
        t = torch.view_as_real(t)
    t = t.reshape(-1).view(torch.uint8)
    return t if t.data_ptr() % 8 == 0 and t.storage_offset() % 8 == 0 else t.clone()


def _recv(sock, n):
    data = bytearray()
    while len(data) < n:
        part = sock.recv(n - len(data))
        if not part:
            raise ConnectionError("the receiver closed the connection")
        data += part
    return bytes(data)


def _read(sock):
    """Reads a frame of a receiver: kind, count, payload."""
    magic, kind, _, count, length, crc = HEADER.unpack(_recv(sock, HEADER.size))
    if magic != b"c10w" or length > 1024:
        raise ConnectionError("the other side does not speak this protocol")
    payload = _recv(sock, length)
    if zlib.crc32(payload) != crc:
        raise ConnectionError("a frame has another checksum than was sent")
    return kind, count, payload


class _Receiver:
    def __init__(self, sock, name):
        self.sock, self.name = sock, name
        self.layout = None  # that it was told
        self.version = 0  # that it was sent
        self.digest = 0


class Publisher:
    """Sends versions of parameters to the receivers that have connected. Threads may share it.

    It keeps a copy of the parameters on the CPU. A receiver that takes no bucket for `timeout` seconds is dropped.
    `ssl_context` is the context of a server.
    """

    def __init__(self, host="127.0.0.1", port=0, bucket=4 << 20, timeout=10.0, full=False, ssl_context=None):
        if not 1024 <= bucket <= 1 << 28 or bucket % 64:
            raise ValueError("bucket is a multiple of 64 from 1 KiB to 256 MiB")
        self.bucket, self.timeout, self.full, self.ssl = bucket, timeout, full, ssl_context
        self.version = 0  # 0 if the copy has no version
        self.last = 0
        self.layout = None  # [(name, dtype, shape)]
        self.dropped = []  # (name, why), the last 1000
        self._text, self._base, self._buckets = b"", [], []
        self._turn = threading.Lock()
        self._list = threading.Lock()
        self._receivers = []
        self._closed = False
        self._strangers = threading.BoundedSemaphore(STRANGERS)
        self._listener = socket.create_server((host, port))
        self.address = self._listener.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def __len__(self):
        """How many receivers are connected."""
        with self._list:
            return len(self._receivers)

    def close(self):
        self._closed = True
        self._listener.close()
        with self._list:
            for r in self._receivers:
                r.sock.close()
            self._receivers = []

    def _accept(self):
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.05)  # no file descriptor is left, for example
                continue
            if self._strangers.acquire(blocking=False):
                threading.Thread(target=self._join, args=(sock,), daemon=True).start()
            else:
                sock.close()

    def _join(self, sock):
        """Reads the name of a new receiver and sends it the current version, if there is one."""
        try:
            sock.settimeout(self.timeout)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.ssl is not None:
                sock = self.ssl.wrap_socket(sock, server_side=True)
            kind, count, name = _read(sock)
            if kind != HELLO or count != PROTOCOL:
                raise ConnectionError("no hello")
        except (OSError, ValueError):
            sock.close()
            return
        finally:
            self._strangers.release()
        r = _Receiver(sock, name.decode("utf-8", "replace"))
        with self._list:
            self._receivers.append(r)
        i, begun, digest = 0, 0, 0
        try:
            while True:  # others have their turn between buckets
                with self._turn:
                    begun = begun or self.version
                    if not begun or self.version != begun or r.version:
                        return  # the next update serves it
                    if i == 0:
                        sock.sendall(self._introduce(r) + _frame(START, struct.pack("<QQ", begun, 0)))
                    if i == len(self._buckets):
                        sock.sendall(_frame(FINISH, struct.pack("<QI", begun, digest)))
                        r.version = begun
                        return
                    crc, parts = self._whole(i)
                    digest = zlib.crc32(struct.pack("<I", crc), digest)
                    for part in parts:
                        sock.sendall(part)
                i += 1
        except OSError as e:
            self._drop(r, e)

    def _drop(self, r, why):
        r.sock.close()
        with self._list:
            if r in self._receivers:
                self._receivers.remove(r)
                self.dropped = (self.dropped + [(r.name, str(why))])[-1000:]

    def _introduce(self, r):
        if r.layout is self.layout:
            return b""
        r.layout = self.layout
        return self._text

    def _plan(self, layout, sizes):
        text = struct.pack("<II", self.bucket, len(layout))
        for name, dtype, shape in layout:
            name, dtype = name.encode(), dtype.encode()
            text += struct.pack("<H", len(name)) + name + struct.pack("<B", len(dtype)) + dtype
            text += struct.pack("<B%dQ" % len(shape), len(shape), *shape)
        self.layout, self._text, self._base = layout, _frame(INIT, text), []
        self._base = [torch.zeros(n, dtype=torch.uint8) for n, _ in sizes]
        self._buckets = [(p, at, min(at + self.bucket, n), unit)
                         for p, (n, unit) in enumerate(sizes) for at in range(0, n, self.bucket)]
        self.version = 0

    def _whole(self, i):
        p, begin, end, _ = self._buckets[i]
        data = _memory(self._base[p][begin:end])
        crc = zlib.crc32(data)
        return crc, [HEADER.pack(b"c10w", FULL, i, 0, len(data), crc), data]

    def _delta(self, i, now):
        """Returns the changed units of bucket i, and copies them to the base; None if all is shorter."""
        p, begin, end, unit = self._buckets[i]
        base, now = self._base[p][begin:end], now[begin:end]
        size, words = end - begin, (end - begin) // 8 * 8
        indices, values, count = [], [], 0
        # Words are compared first, because there are fewer of them than units.
        for a, b, first in ((base[:words], now[:words], 0), (base[words:], now[words:], words // unit)):
            if a.numel() == 0:
                continue
            step = 8 if first == 0 and words else unit
            kind = UNITS[unit]
            a, b = a.view(UNITS[step]), b.view(UNITS[step])
            at = (a != b).nonzero().flatten()
            if at.numel() == 0:
                continue
            new, old = b[at], a[at]
            units = (new.view(kind) != old.view(kind)).nonzero().flatten()
            index = (at[units // (step // unit)] * (step // unit) + units % (step // unit)) + first
            count += index.numel()
            if count * (4 + unit) >= size:
                return None
            indices.append(index.to(torch.int32))
            values.append(new.view(kind)[units])
            a[at] = new
        if count == 0:
            return 0, [HEADER.pack(b"c10w", DELTA, i, 0, 0, 0)]
        parts = [torch.cat(indices).view(torch.uint8), torch.cat(values).view(torch.uint8)]
        crc = zlib.crc32(_memory(parts[1]), zlib.crc32(_memory(parts[0])))
        head = HEADER.pack(b"c10w", DELTA, i, count, count * (4 + unit), crc)
        # bytes, because the tensors end here
        return crc, [head + bytes(_memory(parts[0])) + bytes(_memory(parts[1]))]

    def _encode(self, params, relative, others, out, stop):
        """Puts every bucket into out, for receivers that have the base and for the others."""
        try:
            for i, (p, begin, end, _) in enumerate(self._buckets):
                if stop.is_set():
                    return
                most = self._delta(i, params[p]) if relative else None
                if most is None:
                    self._base[p][begin:end].copy_(params[p][begin:end])
                whole = self._whole(i) if most is None or others else None
                out.put((most or whole, whole))
            out.put(None)
        except BaseException as e:  # publish raises it
            out.put(e)

    @torch.no_grad()
    def publish(self, version, named_tensors):
        """Sends a version and waits until the receivers use it. Versions increase. Returns how many receivers
        use it, and the bytes that went to each receiver that had the version before."""
        named = [(n, t) for n, t in named_tensors]
        params = [_bytes_of(t) for _, t in named]
        layout = [(n, str(t.dtype)[len("torch."):], tuple(t.shape)) for n, t in named]
        with self._turn:
            if self._closed or version <= self.last:
                raise ValueError("weights: closed, or version %d is not after %d" % (version, self.last))
            if layout != self.layout:
                self._plan(layout, [(b.numel(), min(t.element_size(), 8)) for b, (_, t) in zip(params, named)])
            base, self.version, self.last = self.version, 0, version
            relative = base != 0 and not self.full
            with self._list:
                receivers = list(self._receivers)
            fresh = {id(r) for r in receivers if not relative or r.version != base or r.layout is not layout and r.layout != layout}
            begun = {}
            for r in receivers:
                text = self._introduce(r) + _frame(START, struct.pack("<QQ", version, 0 if id(r) in fresh else base))
                r.version, r.digest = version, 0
                begun[id(r)] = text
            buckets, stop = queue.Queue(4), threading.Event()
            encoder = threading.Thread(target=self._encode, daemon=True,
                                       args=(params, relative, relative and bool(fresh), buckets, stop))
            encoder.start()
            sent = self._send(receivers, fresh, begun, buckets, version)
            encoder.join()
            if isinstance(sent, BaseException):
                self.layout = None  # the copy is a mixture
                for r in receivers:
                    self._drop(r, sent)
                raise sent
            self.version = version
            with self._list:
                alive = [r for r in receivers if r in self._receivers]
            return sum(self._acknowledged(r, version) for r in alive), sent

    def _send(self, receivers, fresh, begun, buckets, version):
        alive = list(receivers)

        def each(parts_of):
            for r in list(alive):
                try:
                    for part in parts_of(r):
                        r.sock.sendall(part)
                except OSError as e:
                    alive.remove(r)
                    self._drop(r, e)

        each(lambda r: [begun[id(r)]])
        total = 2 * HEADER.size + 16 + 12
        while True:
            item = buckets.get()
            if item is None:
                break
            if isinstance(item, BaseException):
                return item
            most, whole = item
            for r in alive:
                r.digest = zlib.crc32(struct.pack("<I", (whole or most)[0] if id(r) in fresh else most[0]), r.digest)
            each(lambda r: ((whole or most) if id(r) in fresh else most)[1])
            total += sum(len(part) for part in most[1])
        each(lambda r: [_frame(FINISH, struct.pack("<QI", version, r.digest))])
        return total

    def _acknowledged(self, r, version):
        try:
            while True:
                kind, _, payload = _read(r.sock)
                if kind == REFUSE:
                    raise ConnectionError("it refused: " + payload.decode("utf-8", "replace"))
                if kind != ACK or len(payload) != 8:
                    raise ConnectionError("the other side does not speak this protocol")
                if struct.unpack("<Q", payload)[0] == version:
                    return True
        except OSError as e:
            self._drop(r, e)
            return False
