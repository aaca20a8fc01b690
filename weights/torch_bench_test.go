package weights

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
)

// timedTrainer publishes a model of n bfloat16: all of it, and then twice with 1 % changed. It says how long the
// first and the last took, and how many bytes were sent. Before the first delta after a full update, a
// receiver copies the whole version.
const timedTrainer = `
import json, sys, time
sys.path.insert(0, "torch")
import torch, weights_publisher as w
torch.set_num_threads(1)
n, rounds = int(sys.argv[1]), int(sys.argv[2])
model = {"w": torch.arange(n, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)}
p = w.Publisher()
print(json.dumps("%s:%d" % p.address), flush=True)
while len(p) < 1:
    time.sleep(0.001)
version = 0
def publish(full):
    global version
    version += 1
    p.full = full
    begun = time.perf_counter()
    used, sent = p.publish(version, model.items())
    assert used == 1, p.dropped
    return time.perf_counter() - begun, sent
publish(True), publish(True) # the receiver reserves its two copies
for _ in range(rounds):
    full, whole = publish(True)
    for _ in range(2):
        at = torch.randint(n, (n // 100,))
        bits = model["w"].view(torch.int16)
        bits[at] = bits[at] ^ 1
        delta, part = publish(False)
    print(json.dumps({"full": full, "whole": whole, "delta": delta, "part": part}), flush=True)
    sys.stdin.readline()
`

// BenchmarkTorch compares updates of 1 GiB of bfloat16, from PyTorch to one Go server over loopback, with
// a broadcast between two Go ranks over TCP. It reports the best of five rounds, which take turns, for
// other programs slow down some of them. In three more rounds a goroutine reads 256 KiB of the newest version every
// 2 ms. The benchmark reports the 99th percentile of its times, and that without updates. Run the
// trainer's part on other CPUs, or expect it to take the server's.
//
//	go test -run '^$' -bench Torch -benchtime 1x ./weights
func BenchmarkTorch(b *testing.B) {
	if err := exec.Command(python, "-c", "import torch").Run(); err != nil {
		b.Skip("needs PyTorch: ", err)
	}
	const n, rounds, watched = 512 << 20, 5, 3
	st := store.NewHash()
	defer st.Close()
	var groups [2]*pg.ProcessGroup
	var ranks sync.WaitGroup
	for r := range groups {
		ranks.Go(func() {
			var err error
			groups[r], err = pg.New(within(b), st, r, len(groups), pg.Options{
				BackendOptions: []backend.SpecificOptions{gloo.Options{Wire: gloo.WireTCP}}, Backend: "cpu:gloo",
			})
			if err != nil {
				b.Error(err)
			}
		})
	}
	ranks.Wait()
	require.False(b, b.Failed())
	var elements [2][]tensor.BF16
	for r := range elements {
		elements[r] = make([]tensor.BF16, n)
	}
	for i := range elements[0] {
		elements[0][i] = tensor.BF16(i) // pages that nobody wrote are one page, which is read from the cache
	}
	broadcast := func() time.Duration {
		begun := time.Now()
		for r, g := range groups {
			ranks.Go(func() {
				if err := pg.BroadcastSlice(within(b), g, elements[r], 0); err != nil {
					b.Error(err)
				}
			})
		}
		ranks.Wait()
		return time.Since(begun)
	}
	broadcast()

	cmd := exec.Command(python, "-c", timedTrainer, fmt.Sprint(n), fmt.Sprint(rounds+watched))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(b, err)
	out, err := cmd.StdoutPipe()
	require.NoError(b, err)
	require.NoError(b, cmd.Start())
	defer cmd.Wait()
	lines := bufio.NewScanner(out)
	require.True(b, lines.Scan())
	var address string
	require.NoError(b, json.Unmarshal(lines.Bytes(), &address))
	receiver := dial(b, address, ReceiverOptions{})
	var full, delta, all []float64
	var last struct{ Full, Delta, Whole, Part float64 }
	for range rounds {
		require.True(b, lines.Scan())
		require.NoError(b, json.Unmarshal(lines.Bytes(), &last))
		full, delta = append(full, last.Full), append(delta, last.Delta)
		all = append(all, broadcast().Seconds())
		fmt.Fprintln(in)
	}
	var idle, busy []time.Duration
	for range watched {
		stop := requests(receiver)
		require.True(b, lines.Scan())
		busy = append(busy, stop()...)
		stop = requests(receiver)
		time.Sleep(time.Second)
		idle = append(idle, stop()...)
		fmt.Fprintln(in)
	}
	in.Close()
	b.ReportMetric(p99(idle).Seconds()*1e6, "idle-p99-us")
	b.ReportMetric(p99(busy).Seconds()*1e6, "updates-p99-us")
	b.Logf("full %.2f, delta %.2f, broadcast %.2f s", full, delta, all)
	b.ReportMetric(2*n/slices.Min(full)/1e9, "full-GB/s")
	b.ReportMetric(2*n/slices.Min(all)/1e9, "broadcast-GB/s")
	b.ReportMetric(slices.Min(all)/slices.Min(full), "of-broadcast")
	b.ReportMetric(slices.Min(full)/slices.Min(delta), "delta-times-faster")
	b.ReportMetric(last.Whole/last.Part, "delta-times-fewer-bytes")
	for _, g := range groups {
		ranks.Go(func() { g.Close() })
	}
	ranks.Wait()
}
