package cuda_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/drivertest"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim/simkernels"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/transport/mem"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/work"
)

// openGPU skips the test where there is no GPU.
func openGPU(t *testing.T) driver.Driver {
	t.Helper()
	d, err := openReal()
	if errors.Is(err, driver.ErrNoDevice) {
		t.Skip(err)
	}
	require.NoError(t, err)
	return d
}

// member is a rank of a group on real devices, or on simulated ones across processes.
type member struct {
	ctx        context.Context
	d          driver.Driver
	v          driver.Device
	dev        int
	rank, size int
	b          *cuda.Backend
	cpu        backend.Backend // the same ranks on CPU tensors, as a reference
	way        way             // of its all-reduces
	s          driver.Stream
	delay      *delay

	// The jobs' memory. Closing memory may wait for the device, and with it for the
	// other ranks that share it: nothing is made or closed while they work.
	mem  driver.Memory
	h    driver.HostMemory
	used int
}

// room is how many bytes jobs can have at a time.
const room = 64 << 20

// guard is how many bytes around a tensor must stay as they are.
const guard = 256

// way is what does all-reduces: a work, and whether the host's part is in memory that
// the ranks share or the CPU backend's.
type way struct {
	name, work string
	apart      bool // ranks have different Slots, and so share no memory
}

var ways = []way{
	{"host", cuda.HostWork, false},
	{"CPU backend", cuda.HostWork, true},
	{"direct", cuda.DirectWork, false},
	{"ring", cuda.RingWork, false},
}

// slots is Options.Slots of a rank.
func (w way) slots(rank int) int {
	if w.apart {
		return 1 + rank
	}
	return 0
}

// kernels reports whether kernels do it, which need a device for each rank.
func (w way) kernels() bool { return w.work == cuda.DirectWork || w.work == cuda.RingWork }

// does reports whether ranks on these devices can go this way.
func (w way) does(devices ...int) bool {
	seen := make(map[int]bool)
	for _, dev := range devices {
		seen[dev] = true
	}
	return !w.kernels() || len(seen) == len(devices)
}

// delay is a kernel that takes time.
type delay struct {
	module driver.Module
	f      driver.Function
}

// newDelay returns nil on simulated devices, which have delays of their own.
func newDelay(d driver.Driver, v driver.Device) (_ *delay, err error) {
	defer must.Catch(&err)
	if d.Name() == "sim" {
		return nil, nil
	}
	m := must.Get(v.Load([]byte(drivertest.PTX)))
	f, err := m.Function(drivertest.Delay)
	return &delay{m, f}, err
}

// hold keeps a stream busy for so many clock cycles.
func (y *delay) hold(s driver.Stream, cycles uint64) error {
	if y == nil {
		return nil
	}
	return s.Launch(&driver.Launch{Function: y.f, Grid: driver.Dim{X: 1}, Block: driver.Dim{X: 1}, Args: new(driver.Args).Uint64(cycles)})
}

func (y *delay) Close() error {
	if y == nil {
		return nil
	}
	return y.module.Close()
}

func newMember(ctx context.Context, d driver.Driver, dev, rank, ranks int, st store.Store, way way, cpu func(name string) gloo.Options) (_ *member, err error) {
	m := &member{ctx: ctx, d: d, dev: dev, rank: rank, size: ranks, way: way}
	if m.v, err = d.Device(dev); err != nil {
		return nil, err
	}
	if m.s, err = m.v.NewStream(driver.StreamOptions{Name: fmt.Sprint("caller ", rank)}); err != nil {
		return nil, err
	}
	size := room
	if d.Name() == "sim" {
		size = 1 << 20
	}
	if m.mem, err = m.v.Alloc(size); err != nil {
		return nil, err
	}
	if m.h, err = d.AllocHost(2 * size); err != nil {
		return nil, err
	}
	if m.delay, err = newDelay(d, m.v); err != nil {
		return nil, err
	}
	o := backend.Options{Store: store.Prefix("device", st), Rank: rank, Size: ranks, Timeout: patience, Group: "g"}
	o.Specific = cuda.Options{Driver: d, AllReduce: way.work, CPUOptions: cpu("g"), Slots: way.slots(rank)}
	if m.b, err = cuda.New(ctx, o); err != nil {
		return nil, err
	}
	o.Group, o.Store, o.Specific = "reference", store.Prefix("reference", st), cpu("reference")
	m.cpu, err = gloo.New(ctx, o)
	return m, err
}

func (m *member) close() error {
	return errors.Join(m.b.Close(), m.cpu.Close(), m.s.Close(), m.mem.Close(), m.h.Close(), m.delay.Close())
}

// job is one all-reduce on its way.
type job struct {
	what string
	at   int // in the member's memory
	n    int // bytes, guards included
	cpu  *tensor.Tensor
	w    *work.Work
	seen driver.Event
}

// start issues an all-reduce on elements that the caller's busy stream brings, and
// reads and overwrites afterwards.
func (m *member) start(d tensor.DType, op backend.ReduceOp, n int, rng *rand.Rand) (j *job, err error) {
	j = &job{what: fmt.Sprintf("%v of %d x %v", op, n, d), at: m.used, n: (n*d.Size()+15)&^15 + 2*guard}
	if m.used += j.n; m.used > m.mem.Len() {
		return nil, fmt.Errorf("jobs of %d bytes, there are %d", m.used, m.mem.Len())
	}
	if j.cpu, err = tensor.New(d, n); err != nil {
		return nil, err
	}
	for i := range n {
		if err := j.cpu.SetFloat64(float64(rng.IntN(3)), i); err != nil {
			return nil, err
		}
	}
	dev, in, out := m.mem.Ptr()+driver.Ptr(j.at), m.h.Ptr()+driver.Ptr(j.at), m.h.Ptr()+driver.Ptr(m.mem.Len()+j.at)
	driver.HostAccess(m.d, "filling", driver.Writes(in, j.n))
	b := m.h.Bytes()[j.at : j.at+j.n]
	for i := range b {
		b[i] = 0xa5
	}
	copy(b[guard:], j.cpu.Bytes())
	whole, err := tensor.OnDevice(d, cuda.OnStream(m.mem, m.s), m.mem.Len()/d.Size())
	if err != nil {
		return nil, err
	}
	first := (j.at + guard) / d.Size()
	t, err := whole.Slice(0, first, first+n)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(m.s.Memset(dev, 0xee, j.n), m.delay.hold(m.s, 3_000_000), m.s.Copy(dev, in, j.n)); err != nil {
		return nil, err
	}
	if j.w, err = m.b.AllReduce(m.ctx, []*tensor.Tensor{t}, backend.AllReduceOptions{Op: op}); err != nil {
		return nil, fmt.Errorf("%s: %w", j.what, err)
	}
	if err := errors.Join(j.w.Synchronize(m.s), m.s.Copy(out, dev, j.n), m.s.Memset(dev, 0xdd, j.n)); err != nil {
		return nil, err
	}
	j.seen, err = m.s.Record()
	return j, err
}

// finish compares a job's outcome with the reference's.
func (m *member) finish(j *job, op backend.ReduceOp) (err error) {
	defer must.Catch(&err)
	defer j.seen.Release()
	w := must.Get(m.cpu.AllReduce(m.ctx, []*tensor.Tensor{j.cpu}, backend.AllReduceOptions{Op: op}))
	if err := errors.Join(w.Wait(m.ctx), j.w.Wait(m.ctx), j.seen.Sync(m.ctx)); err != nil {
		return fmt.Errorf("%s: %w", j.what, err)
	}
	at := m.mem.Len() + j.at
	driver.HostAccess(m.d, "comparing", driver.Reads(m.h.Ptr()+driver.Ptr(at), j.n))
	got, want := m.h.Bytes()[at:at+j.n], bytes.Repeat([]byte{0xa5}, j.n)
	copy(want[guard:], j.cpu.Bytes())
	for i := range got {
		if got[i] != want[i] {
			return fmt.Errorf("%s: byte %d is %#x, want %#x", j.what, i-guard, got[i], want[i])
		}
	}
	return nil
}

// suite does every dtype and operator in several sizes, and then some at a time.
func (m *member) suite(sizes []int, burst int) (err error) {
	defer must.Catch(&err)
	rng := rand.New(rand.NewPCG(11, uint64(m.rank)))
	for _, d := range deviceTypes {
		for _, op := range deviceOps {
			if !promised(m.way.work, op, d, m.size) {
				continue
			}
			for _, n := range sizes {
				j := must.Get(m.start(d, op, n, rng))
				must.Do(m.finish(j, op))
				m.used = 0
			}
		}
	}
	var jobs []*job
	for i := range burst {
		j := must.Get(m.start(deviceTypes[i%len(deviceTypes)], backend.Max(), sizes[i%max(len(sizes)-1, 1)], rng))
		jobs = append(jobs, j)
	}
	for _, j := range jobs {
		must.Do(m.finish(j, backend.Max()))
	}
	m.used = 0
	if c := m.b.Explain().Choices[0]; c.Algorithm != m.way.work {
		return fmt.Errorf("all_reduce was done by %q: %s", c.Algorithm, c.Why)
	}
	return nil
}

var gpuSizes = []int{1, 1023, 100_003, 1<<20 + 5}

// goroutines runs ranks of one process, each on its device.
func goroutines(t *testing.T, d driver.Driver, way way, devices []int, f func(m *member) error) {
	ctx, cancel := context.WithTimeout(t.Context(), 5*patience)
	defer cancel()
	st := store.NewHash()
	defer st.Close()
	fabric := mem.NewFabric()
	members := make([]*member, len(devices))
	each := func(f func(r int) error) {
		t.Helper()
		var wg sync.WaitGroup
		errs := make([]error, len(devices))
		for r := range devices {
			wg.Go(func() { errs[r] = f(r) })
		}
		wg.Wait()
		for r, err := range errs {
			require.NoError(t, err, "rank %d", r)
		}
	}
	each(func(r int) (err error) {
		members[r], err = newMember(ctx, d, devices[r], r, len(devices), st, way, func(string) gloo.Options { return join(fabric) })
		return err
	})
	each(func(r int) error { return f(members[r]) })
	each(func(r int) error { return members[r].close() })
}

// TestGPU runs ranks of one process that share a GPU.
func TestGPU(t *testing.T) {
	d := openGPU(t)
	goroutines(t, d, ways[0], []int{0, 0}, func(m *member) error { return m.suite(gpuSizes, 20) })
	require.NoError(t, d.Close())
}

// TestGPUPeers runs ranks of one process on GPUs that reach each other.
func TestGPUPeers(t *testing.T) {
	d := openGPU(t)
	defer d.Close()
	if d.Count() < 2 {
		t.Skip("no usable device beside the first")
	}
	for _, n := range []int{2, min(4, d.Count())} {
		devices := make([]int, n)
		for i := range devices {
			devices[i] = i
		}
		for _, way := range ways {
			if way.work != cuda.HostWork && way.does(devices...) {
				goroutines(t, d, way, devices, func(m *member) error { return m.suite(gpuSizes, 20) })
			}
		}
	}
}

// TestGPUMissing lets a rank wait on a GPU for one that does not come.
func TestGPUMissing(t *testing.T) {
	d := openGPU(t)
	defer d.Close()
	devices := []int{0, 0}
	if d.Count() > 1 {
		devices[1] = 1
	}
	for _, way := range ways {
		if way.does(devices...) {
			goroutines(t, d, way, devices, missing)
		}
	}
}

// TestSimulatedMissing is TestGPUMissing on simulated devices.
func TestSimulatedMissing(t *testing.T) { onVirtualTime(t, testSimulatedMissing) }

func testSimulatedMissing(t *testing.T) {
	for _, way := range ways {
		d := must.Get(sim.Open(sim.Config{Devices: 2, Kernels: simkernels.All(), NoCheck: true}))
		goroutines(t, d, way, []int{0, 1}, missing)
		require.NoError(t, d.Close(), way.name)
	}
}

func missing(m *member) (err error) {
	defer must.Catch(&err)
	rng := rand.New(rand.NewPCG(1, 2))
	j := must.Get(m.start(tensor.Float32, backend.Sum(), 1000, rng))
	if err := m.finish(j, backend.Sum()); err != nil || m.rank == 1 {
		return err
	}
	m.b.SetTimeout(500 * time.Millisecond)
	j = must.Get(m.start(tensor.Float32, backend.Sum(), 100_000, rng))
	err = j.w.Wait(m.ctx)
	var e *work.Error
	if !errors.Is(err, work.ErrTimeout) || !errors.As(err, &e) || e.Info.Rank != 0 || e.Info.Op != work.AllReduce {
		return fmt.Errorf("waiting for a rank that does not come: %w", err)
	}
	// The caller's stream goes on.
	err = j.seen.Sync(m.ctx)
	j.seen.Release()
	return err
}

// What a rank in a process of its own is told.
const (
	envRank   = "C10D_CUDA_TEST_RANK"
	envStore  = "C10D_CUDA_TEST_STORE"
	envSim    = "C10D_CUDA_TEST_SIM" // the folder of simulated devices
	envDevice = "C10D_CUDA_TEST_DEVICE"
	envWay    = "C10D_CUDA_TEST_WAY"
	envEnd    = "C10D_CUDA_TEST_END"
)

// loopback keeps a group on the host's own interface.
func loopback(string) gloo.Options {
	all, err := net.Interfaces()
	if err != nil {
		return gloo.Options{}
	}
	for _, i := range all {
		if i.Flags&net.FlagLoopback != 0 {
			return gloo.Options{Interfaces: []string{i.Name}}
		}
	}
	return gloo.Options{}
}

func openFor(dir string, simulated int) (driver.Driver, []int, error) {
	if dir != "" {
		// GPUs have so many hardware queues.
		d, err := sim.Open(sim.Config{Devices: simulated, Dir: dir, Kernels: simkernels.All(), Queues: 32})
		return d, []int{1, 7, 300}, err
	}
	d, err := openReal()
	return d, gpuSizes, err
}

// TestRankProcess is the part of another process in TestGPUProcesses and
// TestSimulatedProcesses. By itself it does nothing.
func TestRankProcess(t *testing.T) {
	if os.Getenv(envRank) == "" {
		return
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*patience)
	defer cancel()
	rank := must.Get(strconv.Atoi(os.Getenv(envRank)))
	dev := must.Get(strconv.Atoi(os.Getenv(envDevice)))
	d, sizes, err := openFor(os.Getenv(envSim), 2)
	require.NoError(t, err)
	st := must.Get(store.NewFile(os.Getenv(envStore), 2))
	i := must.Get(strconv.Atoi(os.Getenv(envWay)))
	m := must.Get(newMember(ctx, d, dev, rank, 2, st, ways[i], loopback))
	end := os.Getenv(envEnd)
	require.NoError(t, m.before(end, sizes))
	// What comes now lasts until somebody ends the process.
	switch end {
	case endAtWork:
		t.Fatal(m.again())
	case endHeld:
		gate := must.Get(d.AllocHost(4))
		gate.Store32(0, 0)
		require.NoError(t, m.s.WaitValue(gate.Ptr(), 1, driver.Equal))
		must.Get(m.start(tensor.Float32, backend.Sum(), 1000, rand.New(rand.NewPCG(1, 2))))
	}
	if end != endWell {
		fmt.Println("ready")
		must.Get(io.Copy(io.Discard, os.Stdin))
	}
	require.NoError(t, m.close())
	require.NoError(t, st.Close())
	require.NoError(t, d.Close())
}

// transcript is what a process has said so far.
type transcript struct {
	sync.Mutex
	text []byte
}

func (t *transcript) Write(b []byte) (int, error) {
	t.Lock()
	defer t.Unlock()
	t.text = append(t.text, b...)
	return len(b), nil
}

func (t *transcript) String() string {
	t.Lock()
	defer t.Unlock()
	return string(t.text)
}

// How the other process ends.
const (
	endWell   = "well"
	endIdle   = "killed before it calls"
	endHeld   = "killed when it has called and its stream is held up"
	endAtWork = "killed at work"
)

// before is what a member does before its peer ends so.
func (m *member) before(end string, sizes []int) error {
	if end == endWell {
		return m.suite(sizes, 10)
	}
	return m.once(rand.New(rand.NewPCG(4, uint64(m.rank))))
}

// again all-reduces until that fails.
func (m *member) again() error {
	rng := rand.New(rand.NewPCG(3, uint64(m.rank)))
	for {
		if err := m.once(rng); err != nil {
			return err
		}
	}
}

// once all-reduces, and waits for the caller's stream whether that is well or not.
func (m *member) once(rng *rand.Rand) error {
	m.used = 0
	j, err := m.start(tensor.Float32, backend.Sum(), 1000, rng)
	if err != nil {
		e, failed := m.s.Record()
		if failed == nil {
			failed = e.Sync(m.ctx)
			e.Release()
		}
		if failed != nil {
			return fmt.Errorf("the caller's stream does not go on: %v after %v", failed, err)
		}
		return err
	}
	err = j.w.Wait(m.ctx)
	if failed := j.seen.Sync(m.ctx); failed != nil {
		return fmt.Errorf("the caller's stream does not go on: %v after %v", failed, err)
	}
	j.seen.Release()
	return err
}

// processes runs rank 0 here and rank 1 in a process of its own, in every way. Once all ends
// well, and once that process is killed.
func processes(t *testing.T, dir func() string, devices [2]int) {
	for i, way := range ways {
		if !way.does(devices[:]...) {
			continue
		}
		for _, end := range []string{endWell, endIdle, endHeld, endAtWork} {
			t.Run(way.name+"/"+end, func(t *testing.T) {
				at := dir()
				if at != "" { // simulated devices of its own
					t.Parallel()
				}
				process(t, at, devices, i, end)
			})
		}
	}
}

func process(t *testing.T, dir string, devices [2]int, way int, end string) {
	self := must.Get(os.Executable())
	ctx, cancel := context.WithTimeout(t.Context(), 5*patience)
	defer cancel()
	path := filepath.Join(t.TempDir(), "store")
	cmd := exec.CommandContext(ctx, self, "-test.run=^TestRankProcess$", "-test.v")
	cmd.Env = append(os.Environ(), envRank+"=1", envStore+"="+path, envSim+"="+dir, envEnd+"="+end,
		fmt.Sprintf("%s=%d", envDevice, devices[1]), fmt.Sprintf("%s=%d", envWay, way))
	var said transcript
	out := must.Get(cmd.StdoutPipe())
	cmd.Stderr = &said
	in := must.Get(cmd.StdinPipe())
	defer in.Close()
	require.NoError(t, cmd.Start())
	ready, heard := make(chan bool, 1), make(chan struct{})
	go func() {
		defer close(heard)
		for s := bufio.NewScanner(out); s.Scan(); {
			fmt.Fprintln(&said, s.Text())
			if s.Text() == "ready" {
				ready <- true
			}
		}
	}()
	d, sizes, err := openFor(dir, 2)
	require.NoError(t, err)
	st := must.Get(store.NewFile(path, 2))
	m, err := newMember(ctx, d, devices[0], 0, 2, st, ways[way], loopback)
	require.NoError(t, err, "%s", &said)
	require.NoError(t, m.before(end, sizes), "%s", &said)
	if end == endWell {
		require.NoError(t, m.close())
		<-heard
		require.NoError(t, cmd.Wait(), "%s", &said)
		require.NoError(t, d.Close())
		require.NoError(t, st.Close())
		return
	}
	if end == endAtWork {
		rng := rand.New(rand.NewPCG(3, 0))
		for range 10 {
			require.NoError(t, m.once(rng), "%s", &said)
		}
		require.NoError(t, cmd.Process.Kill())
		err = m.again()
	} else {
		select {
		case <-ready:
		case <-ctx.Done():
			t.Fatalf("%s", &said)
		}
		j, failed := m.start(tensor.Float32, backend.Sum(), 1000, rand.New(rand.NewPCG(1, 2)))
		require.NoError(t, failed)
		require.NoError(t, cmd.Process.Kill())
		err = j.w.Wait(ctx)
		require.NoError(t, j.seen.Sync(ctx))
		j.seen.Release()
	}
	t.Log(err)
	require.ErrorIs(t, err, work.ErrPeerDied)
	e := must.As[*work.Error](t, err)
	require.Equal(t, 1, e.Peer)
	require.Equal(t, work.AllReduce, e.Info.Op)
	require.NoError(t, m.close())
	<-heard
	require.Error(t, cmd.Wait())
	if err = d.Close(); ways[way].work != cuda.HostWork {
		require.Error(t, err, "the memory that the other process had open is kept")
	} else {
		require.NoError(t, err)
	}
	require.NoError(t, st.Close())
}

// noDir is for devices that are not simulated.
func noDir() string { return "" }

// TestGPUProcesses runs ranks in processes of their own on one GPU.
func TestGPUProcesses(t *testing.T) {
	require.NoError(t, openGPU(t).Close())
	processes(t, noDir, [2]int{0, 0})
}

// TestGPUProcessesPeers is the same on two GPUs.
func TestGPUProcessesPeers(t *testing.T) {
	d := openGPU(t)
	n := d.Count()
	require.NoError(t, d.Close())
	if n < 2 {
		t.Skip("no usable device beside the first")
	}
	processes(t, noDir, [2]int{0, 1})
}

// TestSimulatedProcesses is the same on simulated devices, whose memory is in files.
func TestSimulatedProcesses(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("simulated devices of several processes are not promised here")
	}
	processes(t, t.TempDir, [2]int{0, 1})
}

// BenchmarkGPU all-reduces float32s on all GPUs, one rank each, in one process: as
// calls that are waited for one by one, back to back, and back to back in a stream.
func BenchmarkGPU(b *testing.B) {
	d, err := openReal()
	if err != nil {
		b.Skip(err)
	}
	defer d.Close()
	for _, bytes := range []int{8 << 10, 1 << 20, 16 << 20, 256 << 20} {
		for _, way := range []string{"single", "back to back", "in a stream"} {
			b.Run(fmt.Sprintf("%d GPUs/%d/%s", d.Count(), bytes, way), func(b *testing.B) {
				fabric, st, size := mem.NewFabric(), store.NewHash(), d.Count()
				defer st.Close()
				var ranks sync.WaitGroup
				ready, start := make(chan error, size), make(chan struct{})
				closing := make(chan struct{})
				for r := range size {
					ranks.Go(func() {
						err := func() (err error) {
							defer must.Catch(&err)
							v := must.Get(d.Device(r))
							s := must.Get(v.NewStream())
							m := must.Get(v.Alloc(bytes))
							t := must.Get(tensor.OnDevice(tensor.Float32, cuda.OnStream(m, s), bytes/4))
							g, err := cuda.New(b.Context(), backend.Options{Store: st, Rank: r, Size: size, Timeout: patience, Group: "g",
								Specific: cuda.Options{Driver: d, AllReduce: cuda.DirectWork, CPUOptions: join(fabric)}})
							if err != nil {
								return err
							}
							ctx := b.Context()
							if way == "in a stream" {
								ctx = cuda.InStream(ctx, s)
							}
							call := func(wait bool) error {
								w, err := g.AllReduce(ctx, []*tensor.Tensor{t}, backend.AllReduceOptions{Op: backend.Max()})
								if err == nil && wait {
									err = w.Wait(b.Context())
								}
								return err
							}
							must.Do(call(true))
							ready <- nil
							<-start
							for i := range b.N {
								must.Do(call(way == "single" || i == b.N-1 || i%50 == 49))
							}
							ready <- nil
							<-closing
							return errors.Join(g.Close(), m.Close(), s.Close())
						}()
						if err != nil {
							ready <- err
						}
					})
				}
				wait := func() {
					for range size {
						if err := <-ready; err != nil {
							b.Fatal(err)
						}
					}
				}
				wait()
				b.SetBytes(int64(bytes))
				b.ResetTimer()
				close(start)
				wait()
				b.StopTimer()
				close(closing)
				ranks.Wait()
			})
		}
	}
}
