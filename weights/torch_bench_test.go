package weights

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
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

// timedTrainer publishes a model of n bfloat16 whenever it is told to: all of it, or what has changed since, after it
// has changed 1 %. It says how long this took, how much of that it used a CPU, and how many bytes were sent.
const timedTrainer = `
import json, sys, time
sys.path.insert(0, "torch")
import torch, weights_publisher as w
torch.set_num_threads(1)
n = int(sys.argv[1])
model = {"w": torch.arange(n, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)}
p = w.Publisher()
def say(**what):
    print(json.dumps(what), flush=True)
say(address="%s:%d" % p.address, torch=torch.__version__, compiled=p._native is not None)
while len(p) < 1:
    time.sleep(0.001)
version = 0
for line in sys.stdin:
    p.full = line == "full\n"
    if line == "change\n":
        at = torch.randint(n, (n // 100,))
        bits = model["w"].view(torch.int16)
        bits[at] = bits[at] ^ 1
        say()
        continue
    version += 1
    begun, cpu = time.perf_counter(), time.process_time()
    used, sent = p.publish(version, model.items())
    say(seconds=time.perf_counter() - begun, cpu=time.process_time() - cpu, sent=sent)
    assert used == 1, p.dropped
`

// timed is a running timedTrainer.
type timed struct {
	b     *testing.B
	in    io.WriteCloser
	lines *bufio.Scanner
	said  struct {
		Address, Torch string
		Compiled       bool
		Seconds, CPU   float64
		Sent           int64
	}
}

func (t *timed) next() {
	t.b.Helper()
	require.True(t.b, t.lines.Scan())
	require.NoError(t.b, json.Unmarshal(t.lines.Bytes(), &t.said))
}

// do has the trainer do something, and returns how long its update took.
func (t *timed) do(what string) float64 {
	t.b.Helper()
	_, err := fmt.Fprintln(t.in, what)
	require.NoError(t.b, err)
	t.next()
	return t.said.Seconds
}

// median of numbers, which it sorts.
func median(all []float64) float64 {
	slices.Sort(all)
	return all[len(all)/2]
}

// BenchmarkTorch compares updates of 1 GiB of bfloat16, from PyTorch to one Go server over loopback, with
// a broadcast between two Go ranks over TCP. In each round there is a broadcast, a full update, and an update after
// 1 % of the elements changed. The benchmark reports medians of the rounds, and medians of their ratios. Other programs
// disturb it: it needs two idle CPUs, and four for the latency.
//
// In more rounds a goroutine reads 256 KiB of the newest version every 2 ms: for a while without updates, and then
// during a full update and two deltas. The benchmark reports the 99th percentile of its times.
//
//	go test -run '^$' -bench Torch -benchtime 1x ./weights [-python FILE]
func BenchmarkTorch(b *testing.B) {
	requireTorch(b)
	const n, rounds, watched = 512 << 20, 9, 6
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

	cmd := exec.Command(*python, "-c", timedTrainer, fmt.Sprint(n))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(b, err)
	out, err := cmd.StdoutPipe()
	require.NoError(b, err)
	require.NoError(b, cmd.Start())
	defer cmd.Wait()
	defer in.Close()
	trainer := timed{b: b, in: in, lines: bufio.NewScanner(out)}
	trainer.next()
	b.Logf("PyTorch %s, with a C compiler %v", trainer.said.Torch, trainer.said.Compiled)
	receiver := dial(b, trainer.said.Address, ReceiverOptions{})
	trainer.do("full")
	b.Logf("first full update %.2f s", trainer.do("full")) // the receiver has its two copies now
	var full, fullCPU, delta, deltaCPU, all, ofBroadcast, faster []float64
	var whole, part int64
	for range rounds {
		all = append(all, broadcast().Seconds())
		full = append(full, trainer.do("full"))
		whole = trainer.said.Sent
		fullCPU = append(fullCPU, trainer.said.CPU)
		trainer.do("change") // after a full update a receiver copies the whole version before the first delta
		trainer.do("delta")
		trainer.do("change")
		delta = append(delta, trainer.do("delta"))
		part = trainer.said.Sent
		deltaCPU = append(deltaCPU, trainer.said.CPU)
		i := len(all) - 1
		ofBroadcast, faster = append(ofBroadcast, all[i]/full[i]), append(faster, full[i]/delta[i])
	}
	b.Logf("seconds of a broadcast %.3f, of a full update %.3f (CPU of the trainer %.3f), of a delta %.3f (%.3f)", all, full, fullCPU, delta, deltaCPU)
	var idle, busy []time.Duration
	for range watched {
		stop := requests(receiver)
		time.Sleep(500 * time.Millisecond)
		idle = append(idle, stop()...)
		for _, what := range []string{"full", "delta", "delta"} {
			trainer.do("change")
			stop = requests(receiver)
			trainer.do(what)
			busy = append(busy, stop()...)
		}
	}
	b.ReportMetric(p99(idle).Seconds()*1e6, "idle-p99-us")
	b.ReportMetric(p99(busy).Seconds()*1e6, "updates-p99-us")
	b.ReportMetric(p99(busy).Seconds()/p99(idle).Seconds(), "updates-p99-of-idle")
	b.ReportMetric(2*n/median(full)/1e9, "full-GB/s")
	b.ReportMetric(2*n/median(all)/1e9, "broadcast-GB/s")
	b.ReportMetric(median(ofBroadcast), "of-broadcast")
	b.ReportMetric(median(faster), "delta-times-faster")
	b.ReportMetric(float64(whole)/float64(part), "delta-times-fewer-bytes")
	for _, g := range groups {
		ranks.Go(func() { g.Close() })
	}
	ranks.Wait()
}
