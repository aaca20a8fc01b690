package pg

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/openfiles"
	"github.com/c10d-go/c10d/internal/testsize"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/store/tcp"
)

// To try it with fewer ranks:
//
//	go test ./pg -run TestProcesses -v -processes 16
var processes = flag.Int("processes", 0, "`ranks` of TestProcesses, a multiple of 8; 0 means 256 in make nightly, and else no test")

const (
	processURL = "C10D_TEST_PROCESS_URL"

	// processPart is the size of a sub-group, processDead the rank that is killed.
	processPart, processDead = 8, 5

	// processLimit is for a whole job, and the ranks' timeout.
	processLimit = 15 * time.Minute
)

// cost is what a process has, and how many calls to the store it has made for an order.
type cost struct {
	Calls       int64
	Goroutines  int
	Descriptors int
	KiB         int // of memory; n processes that share a page have an n-th of it each
}

// processIdle is what a rank has without a group. One goroutine reads orders, and another one follows them.
var processIdle = cost{Goroutines: 2, Descriptors: 12}

// answer is what a rank writes when it has done what it was told.
type answer struct {
	cost
	Err     string
	Culprit int       // whom a failed operation blames, -1 for nobody
	Text    string    // its error
	At      time.Time // when the test has read this: clocks of processes may be set
}

func init() {
	if url := os.Getenv(processURL); url != "" {
		r, orders := &rankProcess{url: url}, make(chan string)
		store.Register("counted", r.open)
		go r.obey(orders)
		for in := bufio.NewScanner(os.Stdin); in.Scan(); {
			orders <- in.Text()
		}
		os.Exit(3) // the test has ended
	}
}

// rankProcess is a rank.
type rankProcess struct {
	url     string
	calls   atomic.Int64
	counted int64 // of calls, in earlier orders
	g, part *ProcessGroup
}

// open opens the launcher's store, which no other job uses, and counts the calls.
func (r *rankProcess) open(ctx context.Context, url string, o store.OpenOptions) (store.Store, error) {
	st, err := tcp.New(ctx, strings.TrimPrefix(url, "counted://"), tcp.Options{Timeout: o.Timeout})
	if err != nil {
		return nil, err
	}
	return CountedStore{st, &r.calls}, nil
}

// obey is the program of a rank. It ends the process after the order to close the group.
func (r *rankProcess) obey(orders <-chan string) {
	out := json.NewEncoder(os.Stdout)
	for order := range orders {
		a := answer{Culprit: -1}
		if err := r.do(order, &a); err != nil {
			a.Err = err.Error()
		}
		a.cost = r.cost()
		out.Encode(a)
		if order == "close" {
			os.Exit(0)
		}
	}
}

func (r *rankProcess) do(order string, a *answer) (err error) {
	defer must.Catch(&err)
	ctx := context.Background()
	switch order {
	case "group":
		r.g, err = Init(ctx, r.url, InitOptions{Options: Options{Timeout: processLimit, Elastic: true}})
		must.Do(err)
		r.tidied()
	case "sub-groups":
		r.part, err = r.g.NewSubgroups(ctx, processPart)
		must.Do(err)
		r.tidied()
	case "collectives":
		for _, g := range []*ProcessGroup{r.g, r.part} {
			for _, n := range []int{1, 10_000} {
				must.Do(addsUp(g, n))
			}
			must.Do(broadcasts(g))
			must.Do(gathers(g))
		}
	case "death":
		err := addsUp(r.g, 1)
		if err == nil {
			return errors.New("an operation without one rank has ended")
		}
		a.Culprit, a.Text = culpritOf(err), err.Error()
	case "next epoch":
		size := r.g.Size()
		v := must.Get(r.g.Reconfigure(ctx, ReconfigureOptions{Min: size - 1, Timeout: processLimit}))
		if len(v.IDs) != size-1 || len(v.Left) != 1 || v.Left[0].ID != processDead {
			return fmt.Errorf("epoch %d has %d members, and %v have left", v.Epoch, len(v.IDs), v.Left)
		}
		must.Do(addsUp(r.g, 1))
		r.g.retired.Wait()
		r.tidied()
	case "close":
		must.Do(r.g.Close())
		for end := time.Now().Add(time.Minute); runtime.NumGoroutine() > processIdle.Goroutines && time.Now().Before(end); {
			time.Sleep(10 * time.Millisecond) // those that have ended still count for a moment
		}
	}
	return nil
}

// tidied returns when this rank has deleted its keys of groups that have been made.
func (r *rankProcess) tidied() {
	for _, g := range append(r.g.now().world.below(r.g), r.g) {
		if ended := g.now().tidier.ended; ended != nil {
			<-ended
		}
	}
}

// addsUp has every rank give n numbers to an all_reduce.
func addsUp(g *ProcessGroup, n int) error {
	v, size := make([]int64, n), int64(g.Size())
	for i := range v {
		v[i] = int64(g.Rank() * (i + 1))
	}
	if err := Wait(g.AllReduce(context.Background(), Slice(v), backend.Sum())); err != nil {
		return err
	}
	return are(g, "all_reduce", v, func(i int) int64 { return size * (size - 1) / 2 * int64(i+1) })
}

func broadcasts(g *ProcessGroup) error {
	root := g.Size() - 1
	v := make([]int64, 1000)
	for i := range v {
		v[i] = int64(1000*g.Rank() + i)
	}
	if err := Wait(g.Broadcast(context.Background(), Slice(v), root)); err != nil {
		return err
	}
	return are(g, "broadcast", v, func(i int) int64 { return int64(1000*root + i) })
}

func gathers(g *ProcessGroup) error {
	const each = 10
	mine, all := make([]int64, each), make([]int64, each*g.Size())
	for i := range mine {
		mine[i] = int64(each*g.Rank() + i)
	}
	if err := Wait(g.AllGatherIntoTensor(context.Background(), Slice(all), Slice(mine))); err != nil {
		return err
	}
	return are(g, "all_gather", all, func(i int) int64 { return int64(i) })
}

// are compares the result of an operation.
func are(g *ProcessGroup, op string, got []int64, want func(i int) int64) error {
	for i, x := range got {
		if x != want(i) {
			return fmt.Errorf("%s of %d ranks: element %d of %d on rank %d is %d, want %d", op, g.Size(), i, len(got), g.Rank(), x, want(i))
		}
	}
	return nil
}

// cost returns what the process has. Its open folder is no cost.
func (r *rankProcess) cost() cost {
	calls := r.calls.Load()
	c := cost{Calls: calls - r.counted, Goroutines: runtime.NumGoroutine(), Descriptors: len(must.Get(os.ReadDir("/proc/self/fd"))) - 1}
	r.counted = calls
	_, rest, _ := strings.Cut(string(must.Get(os.ReadFile("/proc/self/smaps_rollup"))), "\nPss:")
	c.KiB = must.Get(strconv.Atoi(strings.Fields(rest)[0]))
	return c
}

// TestProcesses bounds what a rank of a large job costs: calls to the store, goroutines, descriptors and memory. As under
// c10d run, each rank is a process, and the store is in another one. The ranks make a group and sub-groups, run
// collectives, lose a rank and go on in the next epoch.
func TestProcesses(t *testing.T) {
	size := *processes
	if size == 0 {
		if !testsize.Long() {
			t.Skip("-short: starts 256 processes; make nightly does")
		}
		size = 256
	}
	require.Zero(t, size%processPart, "-processes %d", size)
	for _, wire := range []string{"auto", "tcp"} {
		t.Run(wire, func(t *testing.T) { testProcesses(t, size, wire) })
	}
}

// process is a rank, as the test that has started it sees it.
type process struct {
	cmd     *exec.Cmd
	orders  io.WriteCloser
	answers chan answer // closed when the process ends
	log     string      // a file with what it wrote to its standard error
}

func testProcesses(t *testing.T, size int, wire string) {
	if n := openfiles.Limit(); n < 4*size+200 {
		require.Fail(t, "too few descriptors", "this process and each rank may have %d: ulimit -n 65536", n)
	}
	ctx, cancel := context.WithTimeout(t.Context(), processLimit)
	defer cancel()
	server := must.Get(tcp.Listen(ctx, "127.0.0.1:0", tcp.ServerOptions{World: size}))
	defer server.Close()
	kib := 16<<10 + 96*size
	begun, dir := time.Now(), t.TempDir()
	ranks := make(map[int]*process)
	var readers sync.WaitGroup
	defer func() {
		for _, p := range ranks {
			p.cmd.Process.Kill()
		}
		readers.Wait()
		for _, p := range ranks {
			p.cmd.Wait()
		}
	}()
	exe := must.Get(os.Executable())
	for r := range size {
		p := &process{cmd: exec.Command(exe), answers: make(chan answer, 1), log: filepath.Join(dir, strconv.Itoa(r))}
		rank, all := strconv.Itoa(r), strconv.Itoa(size)
		p.cmd.Env = append(os.Environ(), processURL+"=counted://"+server.Addr().String()+"?prefix=job", "RANK="+rank, "WORLD_SIZE="+all,
			"LOCAL_RANK="+rank, "LOCAL_WORLD_SIZE="+all, "GROUP_RANK=0", "GROUP_WORLD_SIZE=1", "C10D_WIRE="+wire)
		p.orders = must.Get(p.cmd.StdinPipe())
		out := must.Get(p.cmd.StdoutPipe())
		log := must.Get(os.Create(p.log))
		p.cmd.Stderr = log
		err := p.cmd.Start()
		log.Close()
		require.NoError(t, err)
		ranks[r] = p
		readers.Go(func() {
			defer close(p.answers)
			var a answer
			for in := json.NewDecoder(out); in.Decode(&a) == nil; {
				a.At = time.Now()
				p.answers <- a
			}
		})
	}
	live := make(map[int]*process)
	for r, p := range ranks {
		live[r] = p
	}
	t.Logf("%6.1f s  %d processes run", time.Since(begun).Seconds(), size)

	// each has all live ranks obey an order, and holds what that costs: calls of a rank on average, and most of one rank. It
	// calls meanwhile when they have been told.
	each := func(order string, calls int, most cost, meanwhile func()) map[int]answer {
		t.Helper()
		for _, p := range live {
			io.WriteString(p.orders, order+"\n")
		}
		meanwhile()
		answers := make(map[int]answer)
		var sum, top cost
		failed := 0
		for r, p := range live {
			var a answer
			var ok bool
			select {
			case a, ok = <-p.answers:
			case <-ctx.Done():
				p.cmd.Process.Signal(syscall.SIGQUIT) // its log then says where it waits
				for range p.answers {
				}
				require.Fail(t, "no answer", "%s: rank %d has not answered within %v of the job's start: %s", order, r, processLimit, p.wrote())
			}
			if !ok || a.Err != "" {
				if failed++; failed <= 5 {
					t.Errorf("%s: rank %d: %s (ended: %v)\n%s", order, r, a.Err, !ok, p.wrote())
				}
			}
			answers[r] = a
			sum.Calls += a.Calls
			sum.KiB += a.KiB
			top = cost{max(top.Calls, a.Calls), max(top.Goroutines, a.Goroutines), max(top.Descriptors, a.Descriptors), max(top.KiB, a.KiB)}
		}
		require.Zero(t, failed, "%s: ranks that failed", order)
		n := float64(len(live))
		t.Logf("%6.1f s  %s: a rank made %.1f calls to the store and has %.0f KiB, on average; one made %d calls, one has %d goroutines, one %d descriptors and one %d KiB",
			time.Since(begun).Seconds(), order, float64(sum.Calls)/n, float64(sum.KiB)/n, top.Calls, top.Goroutines, top.Descriptors, top.KiB)
		require.LessOrEqual(t, float64(sum.Calls)/n, float64(calls), "%s: calls to the store", order)
		require.LessOrEqual(t, top.Calls, most.Calls, "%s: calls of one rank to the store", order)
		require.LessOrEqual(t, top.Goroutines, most.Goroutines, "%s: goroutines", order)
		require.LessOrEqual(t, top.Descriptors, most.Descriptors, "%s: descriptors", order)
		require.LessOrEqual(t, top.KiB, kib, "%s: KiB", order)
		return answers
	}
	// One rank deletes the keys of a group: some for each member.
	most := func(calls int) cost {
		return cost{Calls: int64(calls), Goroutines: 3*size + 2*processPart + 20, Descriptors: size + processPart + 30}
	}
	nothing, parts := func() {}, size/processPart

	each("group", 40, most(40+5*size), nothing)
	each("sub-groups", 2*parts+10, most(2*parts+10+parts*4*processPart), nothing)
	each("collectives", 0, most(0), nothing)
	delete(live, processDead)
	var died time.Time
	answers := each("death", 0, most(0), func() {
		died = time.Now()
		require.NoError(t, ranks[processDead].cmd.Process.Kill())
	})
	var took time.Duration
	for r, a := range answers {
		took = max(took, a.At.Sub(died))
		require.Equal(t, processDead, a.Culprit, "rank %d: %s", r, a.Text)
		require.True(t, names(a.Text, processDead), "rank %d: %s", r, a.Text)
	}
	t.Logf("%d ranks named rank %d within %v", len(answers), processDead, took.Round(time.Millisecond))
	each("next epoch", 40, most(40+6*size), nothing)
	idle := processIdle
	idle.Calls = 2
	each("close", 2, idle, nothing)
	for r, p := range live {
		for range p.answers {
		}
		require.NoError(t, p.cmd.Wait(), "rank %d", r)
	}
}

// wrote returns the end of what the process wrote to its standard error.
func (p *process) wrote() string {
	text, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	if i := bytes.Index(text, []byte("SIGQUIT")); i >= 0 {
		return string(text[i:])
	}
	return string(text[max(0, len(text)-1000):])
}
