package weights

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/tensor"
)

// BenchmarkPublish updates one receiver over loopback with 256 MiB of bfloat16, of which 1 % change. It
// reports the bytes on the wire and the 99th percentile of a request that reads 256 KiB of the parameters.
//
//	go test -run '^$' -bench Publish ./weights
func BenchmarkPublish(b *testing.B) {
	const n = 128 << 20
	x, err := tensor.FromBytes(tensor.BFloat16, alignedBytes(2*n), n)
	require.NoError(b, err)
	raw := x.Bytes()
	for i := range n {
		raw[2*i], raw[2*i+1] = byte(i), byte(i>>8)
	}
	for _, mode := range []struct {
		name       string
		full, idle bool
	}{{"idle", false, true}, {"full", true, false}, {"delta", false, false}} {
		b.Run(mode.name, func(b *testing.B) {
			p := listen(b, PublisherOptions{Full: mode.full})
			r := dial(b, p.Addr(), ReceiverOptions{})
			require.NoError(b, p.Await(within(b), 1))
			publish := func(version uint64) int64 {
				report, err := p.Publish(within(b), version, []Named{{"w", x}})
				require.NoError(b, err)
				require.Equal(b, 1, report.Receivers)
				return report.Delta
			}
			publish(1)
			publish(2)
			stop := requests(r)
			random := rand.New(rand.NewPCG(1, 1))
			var wire int64
			b.SetBytes(2 * n)
			version := uint64(2)
			for b.Loop() {
				if mode.idle {
					time.Sleep(100 * time.Millisecond)
					continue
				}
				b.StopTimer()
				for range n / 100 {
					raw[2*random.IntN(n)] ^= 1
				}
				b.StartTimer()
				version++
				wire = publish(version)
			}
			b.ReportMetric(float64(wire), "wire-B/op")
			b.ReportMetric(p99(stop()).Seconds()*1e6, "p99-us")
		})
	}
}

// requests reads 256 KiB of the newest version every 2 ms until stop is called, which returns how long each
// read took from the time at which it was due.
func requests(r *Receiver) (stop func() []time.Duration) {
	done, times := make(chan struct{}), make(chan []time.Duration)
	go func() {
		var all []time.Duration
		var sum uint32
		ticks := time.NewTicker(2 * time.Millisecond)
		defer ticks.Stop()
		for {
			select {
			case <-done:
				times <- all
				return
			case due := <-ticks.C:
				v, _ := r.Acquire()
				sum += checksum(v.Tensor("w").Bytes()[:256<<10])
				v.Release()
				all = append(all, time.Since(due))
			}
		}
	}()
	return func() []time.Duration {
		close(done)
		return <-times
	}
}

func p99(times []time.Duration) time.Duration {
	if len(times) == 0 {
		return 0
	}
	slices.Sort(times)
	return times[(len(times)-1)*99/100]
}

func BenchmarkChecksum(b *testing.B) {
	data := alignedBytes(64 << 20)
	b.SetBytes(DefaultBucket)
	i := 0
	for b.Loop() {
		checksum(data[i : i+DefaultBucket])
		i = (i + DefaultBucket) % len(data)
	}
}

// BenchmarkDiff compares buckets of 4 MiB of bfloat16, of which 1 % differ.
func BenchmarkDiff(b *testing.B) {
	const n = 4 << 20
	now, base := alignedBytes(n), alignedBytes(n)
	random := rand.New(rand.NewPCG(1, 1))
	var indices, values []byte
	b.SetBytes(n)
	for b.Loop() {
		b.StopTimer()
		for range n / 2 / 100 {
			now[2*random.IntN(n/2)] ^= 1
		}
		b.StartTimer()
		var short bool
		if indices, values, short = diff(base, now, 2, indices[:0], values[:0]); !short {
			b.Fatal("the delta is not shorter")
		}
	}
}
