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
// reports the bytes on the wire and the 99th percentile of a request that reads 1 MiB of the parameters.
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
			done, times := make(chan struct{}), make(chan []time.Duration)
			go func() {
				var all []time.Duration
				var sum byte
				for {
					select {
					case <-done:
						times <- all
						return
					case <-time.After(time.Millisecond):
					}
					begun := time.Now()
					v, _ := r.Acquire()
					for _, c := range v.Tensor("w").Bytes()[:1<<20] {
						sum += c
					}
					v.Release()
					all = append(all, time.Since(begun))
				}
			}()
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
			close(done)
			all := <-times
			slices.Sort(all)
			b.ReportMetric(float64(wire), "wire-B/op")
			if len(all) > 0 {
				b.ReportMetric(float64(all[(len(all)-1)*99/100].Microseconds()), "p99-us")
			}
		})
	}
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
