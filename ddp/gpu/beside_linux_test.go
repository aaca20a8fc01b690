package gpu_test

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/ebitengine/purego"
	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// besideLibrary is the variable with the file of cuBLAS.
const besideLibrary = "C10D_BESIDE_CUBLAS"

// BenchmarkBeside measures how much longer matrix products take with all-reduces beside them. Each rank is a
// process that c10d run starts:
//
//	go test -c -o gpu.test ./ddp/gpu
//	C10D_BESIDE_CUBLAS=libcublas.so.13 c10d run -n 2 -- ./gpu.test -test.run '^$' -test.bench Beside -test.benchtime 1x
//
// There are ten products of matrices of 4096 columns. After each pair of the first eight comes an all-reduce of
// 32 MiB of float32. The last commands of the stream wait for all of them. WithStreams, Beside and InStream are
// what the all-reduces have as their context. A time is a median of 40.
func BenchmarkBeside(b *testing.B) {
	library := os.Getenv(besideLibrary)
	if library == "" {
		b.Skipf("needs ranks that c10d run has started, and %s", besideLibrary)
	}
	ctx := b.Context()
	d := must.Get(cuda.Default())
	g, err := pg.Init(ctx, "env://", pg.InitOptions{Options: pg.Options{
		Backend: "cpu:gloo,cuda:cuda", BackendOptions: pg.BackendOptions{cuda.Options{Driver: d}},
	}})
	require.NoError(b, err)
	v := must.Get(d.Device(g.Rank() % d.Count()))
	s := must.Get(v.NewStream(driver.StreamOptions{Name: "products"}))
	p := newProducts(b, library, v, s)
	const buckets, bytes = 4, 32 << 20
	ts := make([]*tensor.Tensor, buckets)
	for i := range ts {
		ts[i] = must.Get(tensor.OnDevice(tensor.Float32, p.alloc(bytes), bytes/4))
	}
	step := func(context func(context.Context, driver.Stream) context.Context) {
		var works []*work.Work
		for _, t := range ts {
			p.run(2)
			if context == nil {
				continue
			}
			w := must.Get(g.AllReduce(context(ctx, s), t, pg.Avg()))
			works = append(works, w)
		}
		p.run(2)
		for _, w := range works {
			require.NoError(b, w.Synchronize(s))
		}
	}
	contexts := []struct {
		name string
		of   func(context.Context, driver.Stream) context.Context
	}{
		{"alone", nil},
		{"WithStreams", func(ctx context.Context, s driver.Stream) context.Context { return cuda.WithStreams(ctx, s) }},
		{"Beside", func(ctx context.Context, s driver.Stream) context.Context { return cuda.Beside(ctx, s) }},
		{"InStream", cuda.InStream},
	}
	for _, kind := range []struct {
		name string
		math int32 // as cuBLAS has it
		rows int32
	}{{"tf32/4096 rows", 3, 4096}, {"f32/1024 rows", 0, 1024}, {"tf32/1024 rows", 3, 1024}} {
		p.math, p.rows = kind.math, kind.rows
		b.Run(kind.name, func(b *testing.B) {
			p.b = b
			p.enter()
			defer runtime.UnlockOSThread()
			times := make([][]float64, len(contexts))
			for i := range 45 {
				for k, c := range contexts {
					require.NoError(b, must.Get(g.BarrierAsync(ctx)).Wait(ctx))
					p.drain()
					begun := time.Now()
					step(c.of)
					p.drain()
					if i >= 5 {
						times[k] = append(times[k], time.Since(begun).Seconds()*1e6)
					}
				}
			}
			for k, c := range contexts {
				slices.Sort(times[k])
				b.ReportMetric(times[k][len(times[k])/2], "us/"+c.name)
			}
			b.ReportMetric(0, "ns/op")
		})
	}
	require.NoError(b, g.Close())
	p.close()
}

// products multiplies matrices with cuBLAS.
type products struct {
	b          *testing.B
	v          driver.Device
	s          driver.Stream
	handle     uintptr
	primary    uintptr
	current    func(context uintptr) int32
	setMath    func(handle uintptr, mode int32) int32
	multiply   func(handle uintptr, ta, tb, m, n, k int32, alpha unsafe.Pointer, a driver.Ptr, lda int32, b driver.Ptr, ldb int32, beta unsafe.Pointer, c driver.Ptr, ldc int32) int32
	math, rows int32
	one, zero  float32
	matrices   [3]driver.Ptr
	memory     []driver.Memory
}

const columns = 4096

func newProducts(b *testing.B, library string, v driver.Device, s driver.Stream) *products {
	p := &products{b: b, v: v, s: s, one: 1}
	open := func(name string) uintptr {
		return must.Get(purego.Dlopen(name, purego.RTLD_NOW|purego.RTLD_GLOBAL))
	}
	cu, blas := open("libcuda.so.1"), open(library)
	var retain func(*uintptr, int32) int32
	var create func(*uintptr) int32
	var setStream func(handle, stream uintptr) int32
	purego.RegisterLibFunc(&retain, cu, "cuDevicePrimaryCtxRetain")
	purego.RegisterLibFunc(&p.current, cu, "cuCtxSetCurrent")
	purego.RegisterLibFunc(&create, blas, "cublasCreate_v2")
	purego.RegisterLibFunc(&setStream, blas, "cublasSetStream_v2")
	purego.RegisterLibFunc(&p.setMath, blas, "cublasSetMathMode")
	purego.RegisterLibFunc(&p.multiply, blas, "cublasSgemm_v2")
	require.Zero(b, retain(&p.primary, int32(v.ID().Index)))
	p.enter()
	defer runtime.UnlockOSThread()
	require.Zero(b, create(&p.handle))
	require.Zero(b, setStream(p.handle, s.(interface{ Handle() uintptr }).Handle()))
	for i := range p.matrices {
		p.matrices[i] = p.alloc(columns * columns * 4).Ptr()
	}
	return p
}

// enter keeps the goroutine on its thread, and makes the device's context the thread's.
func (p *products) enter() {
	runtime.LockOSThread()
	require.Zero(p.b, p.current(p.primary))
}

// alloc returns zeros.
func (p *products) alloc(bytes int) driver.Memory {
	m, err := p.v.Alloc(bytes)
	require.NoError(p.b, err)
	p.memory = append(p.memory, m)
	require.NoError(p.b, p.s.Memset(m.Ptr(), 0, bytes))
	return m
}

// run enqueues n products.
func (p *products) run(n int) {
	require.Zero(p.b, p.setMath(p.handle, p.math))
	for range n {
		require.Zero(p.b, p.multiply(p.handle, 0, 0, columns, p.rows, columns, unsafe.Pointer(&p.one), p.matrices[0], columns,
			p.matrices[1], columns, unsafe.Pointer(&p.zero), p.matrices[2], columns), "cublasSgemm")
	}
}

// drain waits for the stream without sleeping.
func (p *products) drain() {
	e, err := p.s.Record()
	require.NoError(p.b, err)
	defer e.Release()
	for {
		over, err := e.Done()
		require.NoError(p.b, err)
		if over {
			return
		}
	}
}

func (p *products) close() {
	for _, m := range p.memory {
		require.NoError(p.b, m.Close())
	}
	require.NoError(p.b, p.s.Close(), fmt.Sprint(p.s))
}
