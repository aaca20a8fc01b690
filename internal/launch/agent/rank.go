package agent

import (
	"errors"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"time"
)

// drain is the longest time that the agent waits for output after a rank's end. It waits
// only if a process that left the rank's group keeps the pipe open.
const drain = 2 * time.Second

// pipeCapacity is the largest capacity of a pipe on Linux.
const pipeCapacity = 1 << 20

// rank is a process that was started.
type rank struct {
	rank, local int
	errorFile   string
	blameFile   string
	epochFile   string
	cmd         *exec.Cmd
	lines       *rankOutput
	guard       *guard

	mu     sync.Mutex
	reaped bool // another process group may have its number now
}

// exit is the end of a rank.
type exit struct {
	rank   *rank
	pid    int
	code   int
	signal string
	at     time.Time
}

// start starts the process. Its end is sent to exits, which must have room.
func (r *rank) start(exits chan<- exit) error {
	started := make(chan error)
	go r.live(started, exits)
	return <-started
}

// live keeps one thread from the start of the process to its end. For the kernel, the end
// of the thread that started the process is the end of its parent.
func (r *rank) live(started chan<- error, exits chan<- exit) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var ends [2]*os.File
	err := r.open(&ends)
	started <- err
	if err != nil {
		return
	}
	var readers sync.WaitGroup
	for i, f := range ends {
		readers.Go(func() { r.lines.copy(&pipe{File: f, rest: pipeCapacity}, i == 1) })
	}
	pid := r.cmd.Process.Pid
	awaitExit(r.cmd)
	at := time.Now()
	r.signal(syscall.SIGKILL) // processes that it left behind
	r.mu.Lock()
	r.reaped = true
	r.mu.Unlock()
	r.cmd.Wait()
	r.guard.forget(pid)

	late := time.AfterFunc(drain, func() {
		for _, f := range ends {
			if f.SetReadDeadline(time.Now()) != nil {
				f.Close()
			}
		}
	})
	readers.Wait()
	late.Stop()
	for _, f := range ends {
		f.Close()
	}
	x := exit{rank: r, pid: pid, code: r.cmd.ProcessState.ExitCode(), at: at}
	if sig, ok := endedBy(r.cmd.ProcessState); ok {
		x.code, x.signal = signalCode(sig), signalName(sig)
	}
	exits <- x
}

// pipe is the reading end of a rank's output. After its deadline it returns the bytes that
// are in the pipe, because the consumer of the output may be slow.
type pipe struct {
	*os.File
	late bool
	rest int // bytes that it still returns after the deadline
}

func (p *pipe) Read(b []byte) (int, error) {
	if !p.late {
		n, err := p.File.Read(b)
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return n, err
		}
		p.late = true
	}
	n, err := readNow(p.File, b[:min(len(b), p.rest)])
	p.rest -= n
	return n, err
}

// open starts the process with its output in pipes and returns their ends.
func (r *rank) open(ends *[2]*os.File) (err error) {
	var theirs [2]*os.File
	defer func() {
		for i := range ends {
			if theirs[i] != nil {
				theirs[i].Close()
			}
			if err != nil && ends[i] != nil {
				ends[i].Close()
			}
		}
	}()
	for i := range ends {
		if ends[i], theirs[i], err = os.Pipe(); err != nil {
			return err
		}
	}
	r.cmd.Stdout, r.cmd.Stderr = theirs[0], theirs[1]
	if err := r.cmd.Start(); err != nil {
		return err
	}
	r.guard.watch(r.cmd.Process.Pid)
	return nil
}

// signal sends sig to the rank's process group, unless the rank was reaped.
func (r *rank) signal(sig syscall.Signal) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.reaped {
		signalGroup(r.cmd.Process, sig)
	}
}

// signalCode returns a shell's exit code for a process that a signal ended.
func signalCode(sig os.Signal) int {
	if s, ok := sig.(syscall.Signal); ok {
		return 128 + int(s)
	}
	return 1
}
