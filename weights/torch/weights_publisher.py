"""Publishes the parameters of a PyTorch model to Go servers: package weights of c10d for Go.

    from weights_publisher import Publisher
    publisher = Publisher("127.0.0.1", 29600)
    ...
    publisher.publish(step, model.named_parameters())   # after a step, or every few

PyTorch 1.13 or later, nothing else. The package's documentation describes the bytes.
"""
import collections
import concurrent.futures
import contextlib
import ctypes
import errno
import math
import mmap
import os
import shlex
import socket
import struct
import subprocess
import tempfile
import threading
import time
import weakref
import zlib

import torch

HELLO, INIT, START, FULL, DELTA, FINISH, ACK, REFUSE = range(1, 9)
PROTOCOL = 2
HEADER = struct.Struct("<4s5I")
STRANGERS = 64  # connections that have not said hello yet. One more closes the oldest
UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SENDERS = 1 << 14  # threads at most, one for each receiver in an update
BLOCK = 1 << 14  # bytes that a checksum adds up

# The function encode makes the frames of some buckets in one call, so that threads seldom wait for each other. For a delta
# it writes the header and the payload to out. For a whole bucket it copies the bucket to the base, past the caches, and
# writes the header alone. The function transmit is sendmsg until all is sent. Each part may take so many milliseconds.
SOURCE = """
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif
enum { BLOCK = 1 << 14, FULL = 4, DELTA = 5 };
struct bucket {
    int64_t base, now, size, unit, number, most; // most is -1 for a whole bucket
    int64_t crc, length;                         // results; length is that of the frame in out
};
static uint32_t table[8][256];
void start(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int k = 0; k < 8; k++) c = c >> 1 ^ (c & 1 ? 0xedb88320 : 0);
        table[0][i] = c;
    }
    for (int t = 1; t < 8; t++)
        for (int i = 0; i < 256; i++) table[t][i] = table[t - 1][i] >> 8 ^ table[0][table[t - 1][i] & 255];
}
static uint32_t crc32(uint32_t crc, const void *data, long n) {
    const uint8_t *p = data;
    crc = ~crc;
    for (; n >= 8; n -= 8, p += 8) {
        uint64_t x;
        memcpy(&x, p, 8);
        x ^= crc;
        crc = 0;
        for (int k = 0; k < 8; k++) crc ^= table[7 - k][x >> 8 * k & 255];
    }
    for (; n > 0; n--, p++) crc = crc >> 8 ^ table[0][(crc ^ *p) & 255];
    return ~crc;
}
static uint32_t checksum(const char *p, long n) {
    uint64_t sums[BLOCK / 8] = {0};
    long blocks = n / BLOCK;
    for (long i = 0; i < blocks; i++, p += BLOCK)
        for (int j = 0; j < BLOCK / 8; j++) {
            uint64_t x;
            memcpy(&x, p + 8 * j, 8);
            sums[j] += x;
        }
    return crc32(blocks ? crc32(0, sums, BLOCK) : 0, p, n % BLOCK);
}
static uint32_t copy(char *base, const char *now, long n) { // returns the checksum
    uint64_t sums[BLOCK / 8] = {0};
    long blocks = n / BLOCK;
    for (long i = 0; i < blocks; i++, base += BLOCK, now += BLOCK)
        for (int j = 0; j < BLOCK; j += 32) {
#ifdef __AVX2__
            __m256i x = _mm256_loadu_si256((const void *)(now + j)), *s = (void *)((char *)sums + j);
            if ((uintptr_t)base % 32 == 0) _mm256_stream_si256((void *)(base + j), x);
            else _mm256_storeu_si256((void *)(base + j), x);
            _mm256_storeu_si256(s, _mm256_add_epi64(x, _mm256_loadu_si256(s)));
#else
            for (int k = j; k < j + 32; k += 8) {
                uint64_t x;
                memcpy(&x, now + k, 8);
                memcpy(base + k, &x, 8);
                sums[k / 8] += x;
            }
#endif
        }
#ifdef __AVX2__
    _mm_sfence();
#endif
    memcpy(base, now, n % BLOCK);
    return crc32(blocks ? crc32(0, sums, BLOCK) : 0, now, n % BLOCK);
}
static inline uint64_t differ(const char *a, const char *b) { // a bit for each of 64 bytes
#ifdef __AVX2__
    const __m256i *x = (const void *)a, *y = (const void *)b;
    uint64_t low = _mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_loadu_si256(x), _mm256_loadu_si256(y))) & 0xffffffff;
    uint64_t high = _mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_loadu_si256(x + 1), _mm256_loadu_si256(y + 1)));
    return ~(low | high << 32);
#else
    uint64_t mask = 0;
    if (memcmp(a, b, 64))
        for (int j = 0; j < 64; j++) mask |= (uint64_t)(a[j] != b[j]) << j;
    return mask;
#endif
}
// A diff finds the units that differ and copies them to base. It asks for memory 2 KiB ahead, which takes 0.9 of the time:
// the processor's own prefetch ends with a page of 4 KiB.
#define DIFF(NAME, T) \\
static long NAME(char *base, const char *now, long size, long most, char *indices, T *values) { \\
    T *a = (T *)base; \\
    const T *b = (const T *)now; \\
    const long unit = sizeof(T), count = size / unit; \\
    long i = 0, n = 0; \\
    for (; i + 64 / unit <= count; i += 64 / unit) { \\
        __builtin_prefetch(base + unit * i + 2048); \\
        __builtin_prefetch(now + unit * i + 2048); \\
        uint64_t mask = differ(base + unit * i, now + unit * i); \\
        if (!mask) continue; \\
        do { \\
            uint32_t k = i + __builtin_ctzll(mask) / unit; \\
            memcpy(indices + 4 * n, &k, 4); \\
            values[n++] = a[k] = b[k]; \\
            mask &= ~(((1ull << unit) - 1) << unit * (k - i)); \\
        } while (mask); \\
        if (n > most) return -1; \\
    } \\
    for (; i < count; i++) \\
        if (a[i] != b[i]) { \\
            uint32_t k = i; \\
            memcpy(indices + 4 * n, &k, 4); \\
            values[n++] = a[i] = b[i]; \\
        } \\
    return n > most ? -1 : n; \\
}
DIFF(diff1, uint8_t)
DIFF(diff2, uint16_t)
DIFF(diff4, uint32_t)
DIFF(diff8, uint64_t)
static long diff(const struct bucket *b, char *indices, void *values) {
    char *base = (char *)b->base;
    const char *now = (const char *)b->now;
    switch (b->unit) {
    case 1: return diff1(base, now, b->size, b->most, indices, values);
    case 2: return diff2(base, now, b->size, b->most, indices, values);
    case 4: return diff4(base, now, b->size, b->most, indices, values);
    default: return diff8(base, now, b->size, b->most, indices, values);
    }
}
void encode(struct bucket *b, long buckets, char *out, void *values) {
    for (; buckets > 0; buckets--, b++) {
        char *payload = out + 24;
        long n = b->most < 0 ? -1 : diff(b, payload, values), size = b->size;
        if (n < 0) {
            b->crc = copy((char *)b->base, (const char *)b->now, size);
            b->length = 24;
        } else {
            size = (4 + b->unit) * n;
            memcpy(payload + 4 * n, values, b->unit * n);
            b->crc = checksum(payload, size);
            b->length = 24 + size;
        }
        uint32_t header[] = {0, n < 0 ? FULL : DELTA, b->number, n < 0 ? 0 : n, size, b->crc};
        memcpy(header, "c10w", 4);
        memcpy(out, header, 24);
        out += b->length;
    }
}
static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000LL + t.tv_nsec / 1000000;
}
int transmit(int fd, struct iovec *parts, long count, int milliseconds) { // returns an errno
    int64_t until = now() + milliseconds;
    while (count > 0) {
        struct msghdr m = {.msg_iov = parts, .msg_iovlen = count < 64 ? count : 64};
        ssize_t sent = sendmsg(fd, &m, MSG_DONTWAIT);
        if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            struct pollfd p = {.fd = fd, .events = POLLOUT};
            int64_t left = until - now();
            int ready = milliseconds < 0 ? poll(&p, 1, -1) : left > 0 ? poll(&p, 1, left) : 0;
            if (ready == 0) return ETIMEDOUT;
            if (ready < 0 && errno != EINTR) return errno;
            continue;
        }
        if (sent < 0 && errno != EINTR) return errno;
        for (; sent >= 0 && count > 0; count--, parts++) {
            if ((size_t)sent < parts->iov_len) {
                parts->iov_base = (char *)parts->iov_base + sent;
                parts->iov_len -= sent;
                break;
            }
            sent -= parts->iov_len;
            until = now() + milliseconds;
        }
    }
    return 0;
}
"""
LINE = 64  # a delta has up to this many units more before diff notices
FIELDS = 8  # of a struct bucket


def _compile(compiler):
    """Returns SOURCE's functions. Returns None if there is no such compiler here."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            source, library = os.path.join(folder, "diff.c"), os.path.join(folder, "diff.so")
            with open(source, "w") as f:
                f.write(SOURCE)
            options = ["-O3", "-march=native", "-fno-strict-aliasing", "-shared", "-fPIC", "-o", library, source]
            subprocess.run(shlex.split(compiler) + options, check=True, capture_output=True, timeout=60)
            lib = ctypes.CDLL(library)
        pointer, long, integer = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
        lib.encode.argtypes, lib.encode.restype = [pointer, long, pointer, pointer], None
        lib.transmit.argtypes, lib.transmit.restype = [integer, pointer, long, integer], integer
        lib.start()
        return lib
    except (OSError, subprocess.SubprocessError):
        return None


def _cpus():
    """Returns how many CPUs this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


def _memory(t):
    """Returns the memory of a contiguous tensor, which must live longer."""
    if t.numel() == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * (t.numel() * t.element_size())).from_address(t.data_ptr())).cast("B")


def _checksum(t):
    """Returns the checksum of a uint8 tensor: the CRC-32 of the sums of its blocks, and of the bytes after them."""
    blocks, crc = t.numel() // BLOCK, 0
    if blocks:
        sums = t[:blocks * BLOCK].view(torch.int64).view(blocks, -1).sum(0)
        crc = zlib.crc32(_memory(sums))
    return zlib.crc32(_memory(t[blocks * BLOCK:]), crc)


def _zeros(n):
    """Returns n zero bytes, in large pages where the system has them: they are copied 1.2 times as fast."""
    try:
        memory = mmap.mmap(-1, n + (2 << 20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has small pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (AttributeError, OSError):
        return torch.zeros(n, dtype=torch.uint8)
    t = torch.frombuffer(memory, dtype=torch.uint8)
    return t[-t.data_ptr() % (2 << 20):][:n]


def _frame(kind, payload=b""):
    crc = _checksum(torch.frombuffer(bytearray(payload), dtype=torch.uint8)) if payload else 0
    return HEADER.pack(b"c10w", kind, 0, 0, len(payload), crc) + payload


def _send(sock, parts, native=None):
    """Sends parts, with one system call if they fit. If native is not None, it sends them without the interpreter's lock."""
    if not hasattr(sock, "sendmsg") or hasattr(sock, "unwrap"):  # TLS has no sendmsg
        for part in parts:
            sock.sendall(part)
    elif native is None:
        sent = sock.sendmsg(parts)
        for part in parts:
            if sent < len(part):
                sock.sendall(memoryview(part)[sent:])
            sent = max(0, sent - len(part))
    else:
        vectors = (ctypes.c_size_t * (2 * len(parts)))()
        for i, part in enumerate(parts):
            vectors[2 * i:2 * i + 2] = _address(part), len(part)
        timeout = sock.gettimeout()
        error = native.transmit(sock.fileno(), vectors, len(parts), -1 if timeout is None else math.ceil(timeout * 1000))
        if error == errno.ETIMEDOUT:
            raise socket.timeout("timed out")
        if error:
            raise OSError(error, os.strerror(error))


def _address(part):
    """Returns where bytes or a writable memoryview begin."""
    if isinstance(part, bytes):
        return ctypes.cast(part, ctypes.c_void_p).value
    return ctypes.addressof(ctypes.c_char.from_buffer(part)) if len(part) else 0


def _bytes_of(t):
    """Returns the bytes of a tensor on the CPU, a view if it is contiguous there."""
    t = t.detach().cpu().contiguous()
    if t.is_complex():
        t = torch.view_as_real(t)
    t = t.reshape(-1).view(torch.uint8)
    return t if t.data_ptr() % 8 == 0 and t.storage_offset() % 8 == 0 else t.clone()


_codes = None  # the float8_e4m3fn of each bfloat16


def _narrow(t):
    """Returns a bfloat16 tensor as float8_e4m3fn and a float32 scale for each row: a value is about code * scale.

    A scale is the power of 2 with which the row's greatest value fits. So scales seldom change from version to
    version, and deltas stay short. Infinities become NaN. PyTorch has the dtype since 2.1, so codes are bytes.
    """
    global _codes
    if _codes is None:
        bits = torch.arange(1 << 16, dtype=torch.int32) << 16
        size = bits & 0x7fffffff
        normal = (size + 0x7ffff + ((size >> 20) & 1) - (120 << 23)) >> 20  # to nearest, ties to even
        tiny = (size.view(torch.float32).clamp(max=1) * 512).round().to(torch.int32)
        code = torch.where(size < 0x3c800000, tiny, normal)
        code = torch.where(size > 0x43e80000, torch.full_like(code, 0x7f), code)
        _codes = (code | ((bits >> 24) & 0x80)).to(torch.uint8)
    rows = t.detach().reshape(t.shape[0], -1)
    size = rows.view(torch.int16) & 0x7fff
    top = torch.where(size < 0x7f80, size, torch.zeros_like(size)).amax(1).to(torch.int32)
    power = (top >> 7) - 127 - 8 + ((top & 0x7f) > 0x60).to(torch.int32)  # 448 is 1.75 * 2^8, and 1.75 is 0x60
    power = torch.where(top == 0, torch.zeros_like(power), power.clamp(-126, 126))
    scale = ((power + 127) << 23).view(torch.float32)
    less = ((127 - power) << 23).view(torch.float32).to(torch.bfloat16)  # exact
    codes = torch.empty(rows.shape, dtype=torch.uint8, device=t.device)
    table, step = _codes.to(t.device), max(1, (1 << 20) // max(1, rows.shape[1]))
    for i in range(0, rows.shape[0], step):  # indices of 4 bytes each, for a part at a time
        part = (rows[i:i + step] * less[i:i + step, None]).view(torch.int16).to(torch.int32) & 0xffff
        codes[i:i + step] = table.index_select(0, part.flatten()).view(part.shape)
    return codes.reshape(t.shape), scale.reshape([-1] + [1] * (t.dim() - 1))


def _recv(sock, n, until):
    data = bytearray()
    while len(data) < n:
        left = until - time.monotonic()
        if left <= 0:
            raise socket.timeout("timed out")
        sock.settimeout(left)  # a socket begins its timeout anew with each byte
        part = sock.recv(n - len(data))
        if not part:
            raise ConnectionError("the receiver closed the connection")
        data += part
    return bytes(data)


def _read(sock, until):
    """Reads a frame of a receiver, which has until then: kind, count, payload. It changes the socket's timeout."""
    magic, kind, _, count, length, crc = HEADER.unpack(_recv(sock, HEADER.size, until))
    if magic != b"c10w" or length > 1024:
        raise ConnectionError("the other side does not speak this protocol")
    payload = _recv(sock, length, until)
    if zlib.crc32(payload) != crc:  # it is shorter than a block
        raise ConnectionError("a frame has another checksum than was sent")
    return kind, count, payload


def _printable(text):
    """Returns text from the network without what a terminal would obey, and at most 4 KiB of it."""
    return "".join(c if c.isprintable() else "?" for c in text[:4096])


def _end(sock):
    """Closes a socket, also if other threads use it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


class _Receiver:
    def __init__(self, sock):
        self.sock, self.name = sock, ""
        self.layout = None  # that it was told
        self.version = 0  # that it was sent
        self.sending = threading.Lock()  # who wants the turn as well takes that first


class _Frames(list):
    """Frames of a bucket, in memory of their own. Late receivers share them."""


class _Group:
    """Some encoded buckets of an update. Receivers that lag behind the fastest one keep those that they have not sent."""

    def __init__(self, encoded, sent):
        self.encoded, self.sent, self.next = encoded, sent, None

    def __del__(self):
        self.sent()


class Publisher:
    """Sends versions of parameters to the receivers that have connected. Threads may share it.

    It keeps a copy of the parameters on the CPU. A receiver that takes no bucket for `timeout` seconds is dropped.
    `full` sends all elements in every update. `ssl_context` is the context of a server. `threads` encode
    buckets; None means one per CPU, at most 8. `compiler` is the command of a C compiler, which makes functions
    that copy parameters, find changed elements and send, once. Without one, PyTorch's operations find them, which takes
    4 times as long, and sends wait for the interpreter's lock. With it, Ctrl-C takes effect after a send.

    `fp8` sends the bfloat16 parameters of two and more dimensions as float8_e4m3fn. Each gets a parameter
    NAME_scale, float32, with one scale for each row. A function fp8(name, tensor) chooses among them.
    """

    def __init__(self, host="127.0.0.1", port=0, bucket=4 << 20, timeout=10.0, full=False, ssl_context=None,
                 threads=None, compiler=os.environ.get("CC", "cc"), fp8=False):
        if not 1 << 16 <= bucket <= 1 << 28 or bucket % 64:
            raise ValueError("bucket is a multiple of 64 from 64 KiB to 256 MiB")
        self.bucket, self.timeout, self.full, self.ssl = bucket, timeout, full, ssl_context
        self.threads, self.fp8 = threads or min(8, _cpus()), fp8
        self._native = _compile(compiler) if compiler else None
        self.version = 0  # 0 if the copy has no version
        self.last = 0
        self.layout = None  # [(name, dtype, shape)]
        self.dropped = []  # (name, why), the last 1000
        self._text, self._base, self._buckets = b"", [], []
        self._memories = []  # of _encode_native
        self._step = max(1, min(4, (16 << 20) // bucket))  # a task encodes so many deltas
        self._pool = concurrent.futures.ThreadPoolExecutor(self.threads)
        self._senders = concurrent.futures.ThreadPoolExecutor(SENDERS)
        self._turn = threading.Lock()
        self._late = threading.Lock()  # of late receivers one is served at a time
        self._updates, self._calm = 0, threading.Condition()  # updates that have the turn or wait for it
        self._list = threading.Lock()
        self._receivers = []
        self._closed = False
        self._strangers = collections.OrderedDict()  # of _Receiver; a set in order
        self._copies = weakref.WeakValueDictionary()  # _Frames of buckets
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
            for r in [*self._strangers, *self._receivers]:
                _end(r.sock)
            self._receivers = []
        self._pool.shutdown(wait=False)
        self._senders.shutdown(wait=False)

    def _accept(self):
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.05)  # no file descriptor is left, for example
                continue
            r = _Receiver(sock)
            with self._list:
                if len(self._strangers) >= STRANGERS:
                    _end(self._strangers.popitem(last=False)[0].sock)
                self._strangers[r] = None
            threading.Thread(target=self._join, args=(r,), daemon=True).start()

    def _join(self, r):
        """Reads the name of a new receiver and sends it the current version, if there is one."""
        try:
            sock = r.sock
            sock.settimeout(self.timeout)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if sock.getsockname()[0] == sock.getpeername()[0]:  # within a host a larger buffer leaves the caches
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
                if hasattr(socket, "TCP_CONGESTION"):  # bbr, for example, would send at a rate that it has measured
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
            if self.ssl is not None:
                r.sock = sock = self.ssl.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                sock.do_handshake()
            kind, count, name = _read(sock, time.monotonic() + self.timeout)
            sock.settimeout(self.timeout)
            if kind != HELLO or count != PROTOCOL:
                raise ConnectionError("no hello")
            r.name = _printable(name.decode("utf-8", "replace"))
            with self._list:
                del self._strangers[r]
                self._receivers.append(r)
        except (OSError, ValueError, KeyError):  # KeyError: another one has taken its place
            with self._list:
                self._strangers.pop(r, None)
            sock.close()
            return
        i, begun, digest = 0, 0, 0
        try:
            while True:  # it has the turn only while a bucket is copied
                with self._late, self._between_updates():
                    begun = begun or self.version
                    if not begun or self.version != begun or r.version:
                        return  # the next update serves it
                    parts = [self._introduce(r) + _frame(START, struct.pack("<QQ", begun, 0))] if i == 0 else []
                    if i < len(self._buckets):
                        frames = self._copies.get(i)
                        if frames is None:
                            crc, whole = self._whole(i)
                            frames = self._copies[i] = _Frames([crc, [bytes(part) for part in whole]])
                        digest = zlib.crc32(struct.pack("<I", frames[0]), digest)
                        parts += frames[1]
                    else:
                        parts.append(_frame(FINISH, struct.pack("<QI", begun, digest)))
                        r.version = begun
                    r.sending.acquire()  # nobody has it without the turn
                try:
                    _send(r.sock, parts)
                finally:
                    r.sending.release()
                frames = None
                i += 1
        except OSError as e:
            self._drop(r, e)

    @contextlib.contextmanager
    def _between_updates(self):
        """The turn of a late receiver. An update waits for one of them, not for one after the other."""
        with self._calm:
            self._calm.wait_for(lambda: not self._updates)
        with self._turn:
            yield

    @contextlib.contextmanager
    def _in_update(self):
        """The turn of an update."""
        with self._calm:
            self._updates += 1
        try:
            with self._turn:
                yield
        finally:
            with self._calm:
                self._updates -= 1
                self._calm.notify_all()

    def _drop(self, r, why):
        _end(r.sock)
        with self._list:
            if r in self._receivers:
                self._receivers.remove(r)
                self.dropped = (self.dropped + [(r.name, _printable(str(why)))])[-1000:]

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
        self._base = [_zeros(n) if n >= 4 << 20 else torch.zeros(n, dtype=torch.uint8) for n, _ in sizes]
        self._buckets = [(p, at, min(at + self.bucket, n), unit)
                         for p, (n, unit) in enumerate(sizes) for at in range(0, n, self.bucket)]
        self.version = 0

    def _whole(self, i, now=None):
        """Returns bucket i of the base. New parameters are copied to the base first."""
        p, begin, end, _ = self._buckets[i]
        base = self._base[p][begin:end]
        if now is not None:
            base.copy_(now[begin:end])
        crc = _checksum(base)
        return crc, [HEADER.pack(b"c10w", FULL, i, 0, end - begin, crc), _memory(base)]

    def _delta(self, i, now):
        """Returns the changed units of bucket i, and copies them to the base; None if all is shorter."""
        p, begin, end, unit = self._buckets[i]
        found = self._find(self._base[p][begin:end], now[begin:end], unit, (end - begin - 1) // (4 + unit))
        if found is None:
            return None
        indices, values = (t.view(torch.uint8) for t in found)
        count = indices.numel() // 4
        size = count * (4 + unit)
        frame = bytearray(HEADER.size + size)
        payload = memoryview(frame)[HEADER.size:]
        payload[:4 * count], payload[4 * count:] = _memory(indices), _memory(values)
        crc = _checksum(torch.frombuffer(payload, dtype=torch.uint8)) if count else 0
        HEADER.pack_into(frame, 0, b"c10w", DELTA, i, count, size, crc)
        return crc, [frame]

    def _find(self, base, now, unit, most):
        size, words = base.numel(), base.numel() // 8 * 8
        kind = UNITS[unit]
        indices, values, count = [torch.empty(0, dtype=torch.int32)], [torch.empty(0, dtype=kind)], 0
        # Words are compared first, because there are fewer of them than units.
        for begin, end, step in ((0, words, 8), (words, size, unit)):
            a, b = base[begin:end].view(UNITS[step]), now[begin:end].view(UNITS[step])
            at = (a != b).nonzero().flatten()
            if at.numel() == 0:
                continue
            new, old = b.index_select(0, at), a.index_select(0, at)
            units = (new.view(kind) != old.view(kind)).nonzero().flatten()
            scale = step // unit
            count += units.numel()
            if count > most:
                return None
            indices.append((at.index_select(0, units // scale) * scale + units % scale + begin // unit).to(torch.int32))
            values.append(new.view(kind).index_select(0, units))
            a[at] = new
        return torch.cat(indices), torch.cat(values)

    def _encode(self, buckets, params, relative, others):
        """Returns each bucket for receivers that have the base, and for the others if there are any. Also returns a
        function to call once the frames are sent."""
        if self._native:
            return self._encode_native(buckets, params, relative, others)
        encoded = []
        for i in buckets:
            now = params[self._buckets[i][0]]
            most = self._delta(i, now) if relative else None
            if most is None:
                whole = self._whole(i, now)
            else:
                whole = self._whole(i) if others else None
            encoded.append((most or whole, whole))
        return encoded, lambda: None

    def _encode_native(self, buckets, params, relative, others):
        fields = (ctypes.c_int64 * (FIELDS * len(buckets)))()
        for k, i in enumerate(buckets):
            p, begin, end, unit = self._buckets[i]
            most = (end - begin - 1) // (4 + unit) if relative else -1
            fields[FIELDS * k:FIELDS * k + 6] = self._base[p].data_ptr() + begin, params[p].data_ptr() + begin, end - begin, unit, i, most
        try:
            memory = self._memories.pop()
        except IndexError:  # most pages of a new one are never written
            room = self._step * (HEADER.size + self.bucket + 4 * LINE)
            memory = torch.empty(room, dtype=torch.uint8), torch.empty(self.bucket + 8 * LINE, dtype=torch.uint8)
        frames, values = memory
        self._native.encode(fields, len(buckets), frames.data_ptr(), values.data_ptr())
        encoded, view, at = [], _memory(frames), 0
        for k, i in enumerate(buckets):
            p, begin, end, _ = self._buckets[i]
            crc, length = fields[FIELDS * k + 6:FIELDS * k + 8]
            frame, at = view[at:at + length], at + length
            if frame[4] == DELTA:
                encoded.append(((crc, [frame]), self._whole(i) if others else None))
            else:  # the parameter's own bytes are in the processor's caches
                whole = crc, [frame, _memory(params[p][begin:end])]
                encoded.append((whole, whole))

        def sent():
            if at <= frames.numel() // 8:  # memory with long deltas is not kept
                self._memories.append(memory)
        return encoded, sent

    def _encoded(self, params, relative, others):
        """Yields groups of buckets, in order. Threads encode the next ones meanwhile."""
        ahead = collections.deque()
        step = self._step if relative else 1  # deltas are short: fewer tasks and system calls
        try:
            for i in range(0, len(self._buckets), step):
                buckets = range(i, min(i + step, len(self._buckets)))
                ahead.append(self._pool.submit(self._encode, buckets, params, relative, others))
                if len(ahead) > 2 * self.threads:
                    yield _Group(*ahead.popleft().result())
            while ahead:
                yield _Group(*ahead.popleft().result())
        finally:
            for f in ahead:
                f.cancel()
            concurrent.futures.wait(ahead)

    def _named(self, name, t):
        """Yields name, tensor and dtype of what is sent for a parameter."""
        if not (self.fp8 and t.dtype == torch.bfloat16 and t.dim() > 1 and t.numel()) or callable(self.fp8) and not self.fp8(name, t):
            yield name, t, str(t.dtype)[len("torch."):]
            return
        codes, scale = _narrow(t)
        yield name, codes, "float8_e4m3fn"
        yield name + "_scale", scale, "float32"

    @torch.no_grad()
    def publish(self, version, named_tensors):
        """Sends a version and waits until the receivers use it. Versions increase. Returns how many receivers
        use it, and the bytes that went to each receiver that had the version before."""
        named = [x for n, t in named_tensors for x in self._named(n, t)]
        params = [_bytes_of(t) for _, t, _ in named]
        layout = [(n, dtype, tuple(t.shape)) for n, t, dtype in named]
        with self._in_update():
            if self._closed or version <= self.last:
                raise ValueError("weights: closed, or version %d is not after %d" % (version, self.last))
            if layout != self.layout:
                self._plan(layout, [(b.numel(), min(t.element_size(), 8)) for b, (_, t, _) in zip(params, named)])
            base, self.version, self.last = self.version, 0, version
            relative = base != 0 and not self.full
            with self._list:
                receivers = list(self._receivers)
            self._copies.clear()
            fresh = {id(r) for r in receivers if not relative or r.version != base or r.layout is not layout and r.layout != layout}
            begun = {}
            for r in receivers:
                begun[id(r)] = self._introduce(r) + _frame(START, struct.pack("<QQ", version, 0 if id(r) in fresh else base))
                r.version = version
            try:
                used, sent = self._update(receivers, fresh, begun, self._encoded(params, relative, relative and bool(fresh)), version)
            except BaseException as e:
                self.layout = None  # the copy is a mixture
                for r in receivers:
                    self._drop(r, e)
                raise
            self.version = version
            return used, sent

    def _update(self, receivers, fresh, begun, groups, version):
        """Sends an update. Each receiver goes on at its own pace and the fastest has the next group encoded, so receivers
        that read nothing all stall at the same time. Returns how many use the version, and the bytes for one with the base."""
        lock, total, firsts = threading.Lock(), 2 * HEADER.size + 16 + 12, [_Group([], lambda: None)] * len(receivers)

        def counted():
            nonlocal total
            for group in groups:
                total += sum(len(part) for (_, parts), _ in group.encoded for part in parts)
                yield group
                group = None  # so that its memory can go

        def after(group):
            with lock:
                if group.next is None:
                    group.next = next(rest, None)
                return group.next

        def feed(r):
            digest, group = 0, firsts.pop()
            try:
                with r.sending:
                    _send(r.sock, [begun[id(r)]])
                    group = after(group)
                    while group:
                        buckets = [whole or most if id(r) in fresh else most for most, whole in group.encoded]
                        _send(r.sock, [part for _, parts in buckets for part in parts], self._native)
                        for crc, _ in buckets:
                            digest = zlib.crc32(struct.pack("<I", crc), digest)
                        group = after(group)
                    until = time.monotonic() + self.timeout
                    _send(r.sock, [_frame(FINISH, struct.pack("<QI", version, digest))])
                    self._acknowledged(r, version, until)
                    return True
            except OSError as e:
                self._drop(r, e)
                return False

        rest = counted()
        if len(receivers) == 1:
            used = feed(receivers[0])
        else:
            feeds = [self._senders.submit(feed, r) for r in receivers]
            try:
                used = sum(f.result() for f in feeds)
            except BaseException as e:
                for r in receivers:
                    self._drop(r, e)
                concurrent.futures.wait(feeds)
                raise
        for _ in rest:  # what no receiver has needed
            pass
        return int(used), total

    def _acknowledged(self, r, version, until):
        """Waits until a receiver uses a version."""
        while True:
            kind, _, payload = _read(r.sock, until)
            if kind == REFUSE:
                raise ConnectionError("it refused: " + payload.decode("utf-8", "replace"))
            if kind != ACK or len(payload) != 8:
                raise ConnectionError("the other side does not speak this protocol")
            if struct.unpack("<Q", payload)[0] == version:
                r.sock.settimeout(self.timeout)
                return
