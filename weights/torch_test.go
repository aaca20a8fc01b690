package weights

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"hash/crc32"
	"io"
	"math"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/tensor"
)

// python is Debian's, whose torch is 1.13.1.
var python = flag.String("python", "/usr/bin/python3", "interpreter with PyTorch, a `file`")

// trainer publishes four versions and then dies in the middle of the fifth.
const trainer = `
import json, os, sys, time, zlib, ctypes
sys.path.insert(0, "torch")
import torch, weights_publisher as w
torch.manual_seed(1)
n = 1 << 20
model = {"w": torch.randn(n).bfloat16(), "odd": torch.randn(7, 3), "half": torch.randn(33).half(), "scalar": torch.tensor(3),
         "mask": torch.tensor([True, False, True]), "none": torch.zeros(0, 4), "z": torch.zeros(5, dtype=torch.complex128),
         "narrow": (torch.randn(9, 4, 30) * torch.logspace(-33, 36, 9)[:, None, None]).bfloat16(),
         "part": torch.randn(101).bfloat16()[1:].view(10, 10).t()}
model["narrow"][7] = 0
model["narrow"][0, 0, 0], model["narrow"][0, 0, 1], model["narrow"][1, 0, :2] = float("nan"), float("inf"), 448 * 2**-90
model["wide"] = model["narrow"].clone()
p = w.Publisher(bucket=1 << 16, compiler=sys.argv[1], fp8=lambda name, t: name == "narrow")
assert not sys.argv[1] or p._native
def say(**what):
    print(json.dumps(what), flush=True)
def crc(t):
    b = w._bytes_of(t)
    return zlib.crc32(w._memory(b))
say(address="%s:%d" % p.address)
while len(p) < 1:
    time.sleep(0.001)
for version in range(1, 5):
    if version == 2:  # 1 % of the elements
        at = torch.randperm(n)[: n // 100]
        model["w"][at] += 1
        model["odd"][6, 2] += 1
        model["part"][3, 3] = 9
        model["z"][4] = 1j
    if version == 4:
        model["w"] = torch.randn(n).bfloat16()
    used, sent = p.publish(version, model.items())
    say(version=version, used=used, sent=sent, crc={k: crc(v) for k, v in model.items() if k != "narrow"}, dropped=p.dropped)
    assert sys.stdin.readline()
# A late receiver may be there now. The process ends when it encodes the fifth group of buckets.
encode, calls = p._encode, []
def dying(*bucket):
    calls.append(bucket)
    if len(calls) == 5:
        os.kill(os.getpid(), 9)
    return encode(*bucket)
p._encode = dying
model["w"] = torch.randn(n).bfloat16()
p.publish(5, model.items())
`

// stalled has 40 receivers that read up to 39 MiB and then nothing. They are late, and then in an update.
const stalled = `
import json, socket, sys, threading, time
sys.path.insert(0, "torch")
import torch, weights_publisher as w
p = w.Publisher(compiler=sys.argv[1], timeout=6)
params = [("big", torch.zeros(64 << 20, dtype=torch.uint8))]
p.publish(1, params)
stalled = []
def read(sock, n):
    while n > 0:
        n -= len(sock.recv(min(n, 1 << 20)))
for i in range(40):
    stalled.append(socket.create_connection(p.address))
    stalled[-1].sendall(w.HEADER.pack(b"c10w", w.HELLO, 0, w.PROTOCOL, 0, 0))
    threading.Thread(target=read, args=(stalled[-1], i << 20), daemon=True).start()
while len(p) + len(p.dropped) < len(stalled):
    time.sleep(0.001)
time.sleep(1)  # they have begun to stall
begun = time.monotonic()
used, _ = p.publish(2, params)
print(json.dumps({"used": used, "dropped": len(p.dropped), "seconds": time.monotonic() - begun}))
`

// TestTorchStalledReceivers: an update waits for the timeout once, however many receivers stall, and wherever.
func TestTorchStalledReceivers(t *testing.T) {
	requireTorch(t)
	for name, compiler := range compilers {
		t.Run(name, func(t *testing.T) {
			requireCompiler(t, compiler)
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
			defer cancel()
			cmd := exec.CommandContext(ctx, *python, "-c", stalled, compiler)
			var stderr bytes.Buffer
			cmd.Stderr = &stderr
			out, err := cmd.Output()
			require.NoError(t, err, &stderr)
			var said struct {
				Used, Dropped int
				Seconds       float64
			}
			require.NoError(t, json.Unmarshal(out, &said), "%s", out)
			require.Zero(t, said.Used)
			require.Equal(t, 40, said.Dropped)
			require.Less(t, said.Seconds, 36.0) // ten groups of buckets, one after the other, take 60
		})
	}
}

// compilers are the ways in which the publisher finds changed elements: in C, and with PyTorch's operations.
var compilers = map[string]string{"compiled": "cc", "operations": ""}

func requireCompiler(t *testing.T, compiler string) {
	if _, err := exec.LookPath("cc"); compiler != "" && err != nil {
		t.Skip("needs a C compiler: ", err)
	}
}

// TestTorch has PyTorch publish to two receivers: all elements, 1 % of them, none, all again. Then it
// is killed in an update. Changed elements are found by compiled C and by PyTorch's operations.
func TestTorch(t *testing.T) {
	for name, compiler := range compilers {
		t.Run(name, func(t *testing.T) {
			requireCompiler(t, compiler)
			testTorch(t, compiler)
		})
	}
}

func testTorch(t *testing.T, compiler string) {
	requireTorch(t)
	cmd := exec.Command(*python, "-c", trainer, compiler)
	cmd.Env = append(os.Environ(), "OMP_NUM_THREADS=1")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	in := must.Get(cmd.StdinPipe())
	out := must.Get(cmd.StdoutPipe())
	require.NoError(t, cmd.Start())
	ended := false
	defer func() {
		if !ended {
			cmd.Process.Signal(syscall.SIGKILL)
			cmd.Wait()
		}
	}()
	lines := bufio.NewScanner(out)
	var said struct {
		Address string
		Version uint64
		Used    int
		Sent    int
		CRC     map[string]uint32
		Dropped [][]string
	}
	next := func() {
		t.Helper()
		said.CRC = nil
		require.True(t, lines.Scan(), &stderr)
		require.NoError(t, json.Unmarshal(lines.Bytes(), &said), lines.Text())
	}
	check := func(r *Receiver) {
		t.Helper()
		require.NoError(t, r.Await(within(t), said.Version), &stderr)
		v, ok := r.Acquire()
		require.True(t, ok)
		defer v.Release()
		require.Equal(t, said.Version, v.Number())
		require.Len(t, v.Params(), len(said.CRC)+2)
		for name, crc := range said.CRC {
			require.Equal(t, crc, crcOf(v.Tensor(name)), "%s of version %d", name, said.Version)
		}
	}
	next()
	first := dial(t, said.Address, ReceiverOptions{Name: "first"})
	receivers := []*Receiver{first}
	const full = 2 << 20
	for version := uint64(1); version <= 4; version++ {
		next()
		require.Equal(t, version, said.Version)
		require.Empty(t, said.Dropped, "%v", first.Status())
		require.GreaterOrEqual(t, said.Used, 1)
		switch version {
		case 1, 4:
			require.Greater(t, said.Sent, full)
		case 2:
			require.Less(t, said.Sent, full/20)
			require.Greater(t, said.Sent, full/40)
		case 3:
			require.Less(t, said.Sent, full/200)
		}
		if version == 3 {
			receivers = append(receivers, dial(t, said.Address, ReceiverOptions{Name: "late"}))
		}
		for _, r := range receivers {
			check(r)
		}
		v, _ := first.Acquire()
		require.Equal(t, []int{10, 10}, v.Tensor("part").Shape())
		require.Equal(t, tensor.BFloat16, v.Tensor("w").DType())
		requireNarrow(t, v)
		v.Release()
		must.Get(in.Write([]byte("\n")))
	}
	err := cmd.Wait()
	ended = true
	require.ErrorContains(t, err, "killed", &stderr)
	for _, r := range receivers {
		require.Eventually(t, func() bool { return r.Status().Err != nil }, patience, 1e6)
		check(r)
		require.Greater(t, r.Status().Bytes, int64(full+full/4), "it had half of version 5")
	}
}

// publisher runs a publisher in PyTorch with a timeout of half a second, and returns its address and its output. The
// script goes on with the publisher as p.
func publisher(t *testing.T, script string) (addr string, out *bufio.Reader) {
	t.Helper()
	requireTorch(t)
	cmd := exec.Command(*python, "-c", `
import sys, time
sys.path.insert(0, "torch")
import torch, weights_publisher as w
p = w.Publisher(timeout=0.5, compiler="")
print("%s:%d" % p.address, flush=True)
`+script+`
sys.stdin.readline()
`)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	in := must.Get(cmd.StdinPipe())
	pipe := must.Get(cmd.StdoutPipe())
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		in.Close()
		cmd.Process.Kill()
		cmd.Wait()
	})
	out = bufio.NewReader(pipe)
	line, err := out.ReadString('\n')
	require.NoError(t, err, &stderr)
	return strings.TrimSpace(line), out
}

// TestTorchSlowHello: a stranger that sends its hello byte by byte is closed after the publisher's timeout, and does
// not keep a place.
func TestTorchSlowHello(t *testing.T) {
	addr, _ := publisher(t, "")
	c := must.Get(net.Dial("tcp", addr))
	defer c.Close()
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		io.Copy(io.Discard, c)
	}()
	hello := header{kind: kindHello, count: protocol}.withPayload(make([]byte, maxName))
	next := time.NewTicker(100 * time.Millisecond)
	defer next.Stop()
	for _, b := range hello[:300] {
		select {
		case <-closed:
			return
		case <-next.C:
			c.Write([]byte{b})
		}
	}
	t.Error("it may take 30 s for its hello")
}

// TestTorchStrangers: one stranger too many closes the oldest, and so keeps no receiver out. Names and refusals show only
// printable characters.
func TestTorchStrangers(t *testing.T) {
	addr, out := publisher(t, `
p.timeout, until = 600, time.monotonic() + 20
while len(p) < 1 and time.monotonic() < until:
    time.sleep(0.001)
used, _ = p.publish(1, [("w", torch.zeros(4))])
print(used, ascii(p.dropped), flush=True)
`)
	dialed := func() net.Conn {
		c := must.Get(net.Dial("tcp", addr))
		t.Cleanup(func() { c.Close() })
		return c
	}
	for range 64 {
		dialed()
	}
	c := dialed()
	const bad = "\x1b]0;owned\a\n\xff\u202e"
	_, err := c.Write(append(header{kind: kindHello, count: protocol}.withPayload([]byte(bad)), frame(kindRefuse, []byte(bad))...))
	require.NoError(t, err)
	line := must.Get(out.ReadString('\n'))
	require.Equal(t, `0 [('?]0;owned??\ufffd?', 'it refused: ?]0;owned??\ufffd?')]`+"\n", line)
}

// TestTorchOtherAcknowledgements: a receiver that acknowledges another version again and again holds an update up for
// no longer than the publisher's timeout.
func TestTorchOtherAcknowledgements(t *testing.T) {
	addr, out := publisher(t, `
while len(p) < 1:
    time.sleep(0.001)
used, _ = p.publish(1, [("w", torch.zeros(4))])
print("published to", used, flush=True)
`)
	c := must.Get(net.Dial("tcp", addr))
	defer c.Close()
	must.Get(c.Write(header{kind: kindHello, count: protocol}.withPayload([]byte("other"))))
	published := make(chan string, 1)
	go func() {
		line, _ := out.ReadString('\n')
		published <- line
	}()
	flood := make(chan struct{})
	go func() {
		defer close(flood)
		many := bytes.Repeat(header{kind: kindAck}.withPayload(make([]byte, 8)), 100)
		for err := error(nil); err == nil; {
			_, err = c.Write(many)
		}
	}()
	defer func() {
		c.Close()
		<-flood
	}()
	select {
	case line := <-published:
		require.Equal(t, "published to 0\n", line)
	case <-time.After(30 * time.Second):
		t.Error("the update waits for 30 s")
	}
}

// requireTorch skips a test or benchmark that has no PyTorch.
func requireTorch(t testing.TB) {
	t.Helper()
	if err := exec.Command(*python, "-c", "import torch").Run(); err != nil {
		if os.Getenv("C10D_REQUIRE_SERVICES") == "1" {
			t.Fatalf("PyTorch is required: %s -c 'import torch': %v", *python, err)
		}
		t.Skipf("needs PyTorch (Debian: python3-torch): %s -c 'import torch': %v", *python, err)
	}
}

// requireNarrow wants the codes of "narrow" to be those of "wide" divided by the rows' scales.
func requireNarrow(t *testing.T, v Version) {
	t.Helper()
	wide := must.Get(tensor.Data[tensor.BF16](v.Tensor("wide")))
	codes := must.Get(tensor.Data[tensor.F8E4M3](v.Tensor("narrow")))
	scales := must.Get(tensor.Data[float32](v.Tensor("narrow_scale")))
	require.Equal(t, []int{9, 4, 30}, v.Tensor("narrow").Shape())
	require.Equal(t, []int{9, 1, 1}, v.Tensor("narrow_scale").Shape())
	for row, scale := range scales {
		var top float32
		for i := row * 120; i < (row+1)*120; i++ {
			x := wide[i].Float32() / scale
			if want := tensor.F8E4M3From(x); want&0x7f != 0x7f || codes[i]&0x7f != 0x7f { // NaNs have any sign
				require.Equal(t, want, codes[i], "element %d, %v", i, x)
			}
			if x < 0 {
				x = -x
			}
			if x <= math.MaxFloat32 {
				top = max(top, x)
			}
		}
		if row != 7 {
			require.Greater(t, top, float32(224), "row %d", row)
			require.LessOrEqual(t, top, float32(448), "row %d", row)
		}
	}
}

func crcOf(t *tensor.Tensor) uint32 { return crc32.ChecksumIEEE(t.Bytes()) }
