package faults

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"time"

	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/script"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/store/tcp"
	"github.com/c10d-go/c10d/work"
)

// roleVariable makes a process a rank or the store of a Case.
const roleVariable = "C10D_FAULTS_ROLE"

// role is what a process has to do.
type role struct {
	Store   string // the address to serve a store at; then the rest is empty
	Op      string
	Wire    gloo.Wire
	Detail  bool
	Timeout time.Duration
	Script  string   // one JSON object a line
	Want    []string // this rank's digest of each line
	Size    int      // bytes of a tensor, for PyTorch
	GoOn    bool     // reconfigures the group after the fault

	// Of a Trial, whose script is steps:
	Job   string // the URL of the store; then Store and Script are empty
	Name  int    // of this process
	Ranks int    // in epoch 0; the process joins later if Name is not below
	Soak  bool   // it says what it uses at the beginning of each epoch
}

// report is what a rank says in the end.
type report struct {
	Rank   int       `json:"rank"`
	Blames string    `json:"blames"`
	Says   string    `json:"says"`
	At     time.Time `json:"at"`
	GoesOn bool      `json:"goes_on"`
	Wrong  []string  `json:"wrong"`
	Left   string    `json:"left"`
	Log    string    `json:"log,omitempty"` // what the rank was told before it blamed one

	// With role.GoOn:
	Leaves bool      `json:"leaves,omitempty"` // this rank would break the next epoch, too, and leaves
	Back   time.Time `json:"back,omitzero"`    // when the first all_reduce of the next epoch ended
	Ends   string    `json:"ends,omitempty"`   // why there was none
}

// Commands to a rank. Each is a line of its standard input.
const (
	cmdGo     = "go"     // begins the script
	cmdPanic  = "panic"  // panics between two operations, with a deferred Close
	cmdExit   = "exit"   // ends the process at once
	cmdCancel = "cancel" // cancels the context of all operations
	cmdWatch  = "watch"  // reports in watchFor whether operations still complete
	cmdEnd    = "end"    // ends a rank of a Trial
)

// errCancel is the cause of the contexts that cmdCancel cancels.
var errCancel = errors.New("a fault of this rank")

const (
	watchFor = 2 * time.Second

	// closeIn is how long goroutines and descriptors may stay after Close.
	closeIn = 10 * time.Second

	// backIn is how long the next epoch may take to complete an operation.
	backIn = 20 * time.Second
)

// Role runs a rank or a store, if this process is one. It returns false if it is not.
func Role() (ok bool, err error) {
	text := os.Getenv(roleVariable)
	if text == "" {
		return false, nil
	}
	var r role
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		return true, err
	}
	switch {
	case r.Job != "":
		return true, r.steps()
	case r.Store == "":
		return true, r.rank()
	}
	s, err := tcp.Listen(context.Background(), r.Store)
	if err != nil {
		return true, err
	}
	defer s.Close()
	fmt.Println(s.Addr())
	_, err = io.Copy(io.Discard, os.Stdin)
	return true, err
}

// rank joins the group of the environment and runs the script until it fails.
func (r *role) rank() error {
	commands := listen()
	before, err := resources()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	var log strings.Builder // of a session's one diagnosis
	debug := slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	g, err := pg.Init(ctx, "env://", pg.InitOptions{Options: pg.Options{
		Logger: debug, Timeout: time.Minute, Detail: r.Detail, Elastic: r.GoOn, Backend: "cpu:" + gloo.Name, BackendOptions: pg.BackendOptions{gloo.Options{Wire: r.Wire}},
	}})
	if err != nil {
		return err
	}
	defer g.Close() // also after a panic
	if err := g.Barrier(ctx); err != nil {
		return err
	}
	g.SetTimeout(r.Timeout)
	fmt.Println("ready")
	if <-commands != cmdGo {
		return errors.New("the first command must be go")
	}

	var panics atomic.Bool
	var done atomic.Int64
	said := make(chan report, 2)
	go func() {
		for c := range commands {
			switch c {
			case cmdPanic:
				panics.Store(true)
			case cmdExit:
				os.Exit(3)
			case cmdCancel:
				cancel(errCancel)
			case cmdWatch:
				n := done.Load()
				time.AfterFunc(watchFor, func() { said <- report{Rank: g.Rank(), GoesOn: done.Load() > n, At: time.Now()} })
			}
		}
		os.Exit(0)
	}()
	go func() {
		json.NewEncoder(os.Stdout).Encode(<-said)
	}()
	x := report{Rank: g.Rank()}
	err = r.operations(ctx, g, &x, func() {
		done.Add(1)
		if panics.Load() {
			panic("a fault of this rank")
		}
	})
	x.At, x.Says, x.Blames = time.Now(), err.Error(), blamed(err)
	if e := new(work.Error); errors.As(err, &e) {
		x.Says = e.Error()
	}
	if r.GoOn {
		r.goOn(g, err, &x)
	}
	cancel(nil)
	if err := g.Close(); err != nil {
		x.Left = "Close: " + err.Error()
	}
	x.Log = log.String()
	if left, err := leftBehind(before); err != nil {
		return err
	} else if left != "" {
		x.Left = left
	}
	said <- x
	select {} // the end of standard input ends the process
}

// goOn begins the next epoch after a fault, and completes an all_reduce in it.
func (r *role) goOn(g *pg.ProcessGroup, fault error, x *report) {
	if x.Leaves = breaks(fault, g.Rank()); x.Leaves {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), backIn)
	defer cancel()
	_, err := g.Reconfigure(ctx, pg.ReconfigureOptions{Min: g.Size()/2 + 1, Timeout: backIn / 2})
	sum := []int64{1}
	if err == nil {
		err = pg.Wait(g.AllReduce(ctx, pg.Slice(sum), pg.Sum()))
	}
	switch {
	case err != nil:
		x.Ends = err.Error()
	case sum[0] != int64(g.Size()):
		x.Wrong = append(x.Wrong, fmt.Sprintf("rank %d of %d has %d after the fault", g.Rank(), g.Size(), sum[0]))
	default:
		x.Back = time.Now()
	}
}

// breaks reports whether the next epoch would fail as the last one did, if this rank were in it. No
// rank knows how to mend a link, so the higher one of its ranks leaves. A rank that hears nobody
// leaves, too.
func breaks(err error, self int) bool {
	var l *work.LinkError
	var e *work.Error
	if errors.As(err, &l) {
		return self == l.Ranks[1]
	}
	return errors.As(err, &e) && errors.Is(err, work.ErrTimeout) && e.Peer == self
}

// operations runs the script until an operation fails.
func (r *role) operations(ctx context.Context, g *pg.ProcessGroup, x *report, each func()) error {
	if r.Op == monitored {
		for {
			if err := g.MonitoredBarrier(ctx); err != nil {
				return err
			}
			each()
		}
	}
	lines, err := script.Parse(strings.NewReader(r.Script), g.Size())
	if err != nil {
		return err
	}
	for {
		err := script.Run(ctx, g, lines, func(got script.Result) {
			if got.Error == "" && got.SHA256 != r.Want[got.I] {
				x.Wrong = append(x.Wrong, fmt.Sprintf("rank %d has a wrong result of %s, line %d", g.Rank(), got.Op, got.I))
			}
			if got.Error == "" {
				each()
			}
		})
		if err != nil {
			return err
		}
	}
}

// blamed returns what an error blames.
func blamed(err error) string {
	var l *work.LinkError
	var e *work.Error
	switch {
	case errors.As(err, &l):
		return link(l.Ranks[0], l.Ranks[1])
	case errors.As(err, &e) && e.Peer >= 0:
		return rank(e.Peer)
	case strings.Contains(err.Error(), "answers take"): // the table
		return tooSlow
	}
	return ""
}

// listen returns the lines of standard input.
func listen() <-chan string {
	lines := make(chan string)
	go func() {
		defer close(lines)
		for sc := bufio.NewScanner(os.Stdin); sc.Scan(); {
			lines <- sc.Text()
		}
	}()
	return lines
}

// leftBehind waits until goroutines and descriptors are as few as before. It returns what is left
// after closeIn. Two goroutines may read commands and write the report.
func leftBehind(before [2]int) (string, error) {
	for end := time.Now().Add(closeIn); ; time.Sleep(10 * time.Millisecond) {
		now, err := resources()
		if err != nil || now[0] <= before[0]+2 && now[1] <= before[1] {
			return "", err
		}
		if time.Now().After(end) {
			return fmt.Sprintf("%d goroutines and %d descriptors, %d and %d before\n%s", now[0], now[1], before[0], before[1], stacks()), nil
		}
	}
}

// resources returns how many goroutines and descriptors this process has.
func resources() (n [2]int, err error) {
	// The first socket of a process leaves a descriptor.
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return n, err
	}
	l.Close()
	files, err := os.ReadDir("/proc/self/fd")
	return [2]int{runtime.NumGoroutine(), len(files)}, err
}

func stacks() []byte {
	b := make([]byte, 1<<20)
	return b[:runtime.Stack(b, true)]
}
