package faults

import (
	"bufio"
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/netns"
	"github.com/c10d-go/c10d/internal/script"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/store"
)

//go:embed torch.py
var torchProgram string

const (
	// startIn is how long ranks may take to meet. PyTorch takes long to load.
	startIn = 2 * time.Minute

	// hangsAfter is how long after the timeout of its operation a rank hangs.
	hangsAfter = 30*time.Second + backIn
)

// Lab runs cases on one network, one at a time.
type Lab struct {
	Python string // the interpreter that has PyTorch
	net    *netns.Network
}

// NewLab makes a network of so many hosts. Name tells labs of one process apart.
func NewLab(name string, hosts int) (*Lab, error) {
	n, err := netns.New(name, hosts)
	if err != nil {
		return nil, err
	}
	return &Lab{Python: "/usr/bin/python3", net: n}, nil
}

// Close removes the network.
func (l *Lab) Close() { l.net.Close() }

// process is a rank or the store.
type process struct {
	cmd    *exec.Cmd
	in     io.WriteCloser
	lines  chan string // closed at the end of its output
	stderr *bytes.Buffer
}

// start starts a process on a host.
func (l *Lab) start(host int, r role, program []string, env ...string) (*process, error) {
	return start(l.net.Command(host, program[0], program[1:]...), r, env...)
}

// start starts a process of package faults.
func start(cmd *exec.Cmd, r role, env ...string) (*process, error) {
	text, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	p := &process{cmd: cmd, lines: make(chan string, 4), stderr: new(bytes.Buffer)}
	p.cmd.Env = append(append(os.Environ(), env...), roleVariable+"="+string(text))
	p.cmd.Stderr = p.stderr
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		defer close(p.lines)
		sc := bufio.NewScanner(out)
		for sc.Buffer(nil, 8<<20); sc.Scan(); {
			p.lines <- sc.Text()
		}
	}()
	return p, nil
}

// next returns the next line of a process.
func (p *process) next(within time.Duration) (string, error) {
	t := time.NewTimer(within)
	defer t.Stop()
	select {
	case s, ok := <-p.lines:
		if !ok {
			p.cmd.Wait()
			return "", fmt.Errorf("it has ended: %v: %s", p.cmd.ProcessState, p.stderr)
		}
		return s, nil
	case <-t.C:
		return "", errHangs
	}
}

var errHangs = fmt.Errorf("it says nothing")

// signal sends a signal of Unix, which Windows does not have.
func (p *process) signal(name string) error {
	return exec.Command("kill", "-"+name, strconv.Itoa(p.cmd.Process.Pid)).Run()
}

func (p *process) stop() {
	p.cmd.Process.Kill()
	for range p.lines {
	}
	p.cmd.Wait()
}

// wanted caches the digests of a script.
var wanted sync.Map

// want returns the digest of each line on each rank. It runs the script on ranks in memory.
func want(ctx context.Context, lines []script.Line, size int) ([][]string, error) {
	key := fmt.Sprint(size, lines)
	if got, ok := wanted.Load(key); ok {
		return got.([][]string), nil
	}
	f, st := gloo.NewFabric(), store.NewHash()
	defer st.Close()
	digests, errs := make([][]string, size), make([]error, size)
	var wg sync.WaitGroup
	for r := range size {
		wg.Go(func() {
			g, err := pg.New(ctx, st, r, size, pg.Options{Timeout: startIn, Backend: "cpu:" + gloo.Name, BackendOptions: pg.BackendOptions{gloo.Options{Fabric: f}}})
			if errs[r] = err; err != nil {
				return
			}
			defer g.Close()
			errs[r] = script.Run(ctx, g, lines, func(x script.Result) { digests[r] = append(digests[r], x.SHA256) })
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return nil, err
		}
	}
	wanted.Store(key, digests)
	return digests, nil
}

// Run runs a case. The error says why it could not be tried.
func (l *Lab) Run(ctx context.Context, c Case) (*Record, error) {
	defer l.net.Heal()
	digests, err := want(ctx, c.Lines, len(c.Hosts))
	if err != nil {
		return nil, err
	}
	var text strings.Builder
	for _, line := range c.Lines {
		b, err := json.Marshal(line)
		if err != nil {
			return nil, err
		}
		text.Write(append(b, '\n'))
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	server, err := l.start(netns.Bridge, role{Store: l.net.Address(netns.Bridge) + ":0"}, []string{self, "faults"})
	if err != nil {
		return nil, err
	}
	defer server.stop()
	address, err := server.next(startIn)
	if err != nil {
		return nil, fmt.Errorf("the store: %w", err)
	}
	host, port, _ := strings.Cut(address, ":")

	ranks := make([]*process, len(c.Hosts))
	for r := range ranks {
		how := role{Op: c.Op, Detail: c.Detail, Timeout: c.Fault.Timeout(), Script: text.String(), Want: digests[r], Size: c.bytes(), GoOn: c.GoOn}
		program := []string{self, "faults"}
		switch c.Wire {
		case Memory:
			how.Wire = gloo.WireNative
		case TCP:
			how.Wire = gloo.WireTCP
		case Gloo:
			how.Wire = gloo.WireGloo
		case Torch:
			program = []string{l.Python, "-c", torchProgram}
		}
		p, err := l.start(c.Hosts[r], how, program, "RANK="+strconv.Itoa(r), "WORLD_SIZE="+strconv.Itoa(len(ranks)),
			"MASTER_ADDR="+host, "MASTER_PORT="+port, "TORCHELASTIC_USE_AGENT_STORE=True", "TORCHELASTIC_RESTART_COUNT=0",
			"GLOO_SOCKET_IFNAME=ve0", "C10D_HOST=host"+strconv.Itoa(c.Hosts[r]), "OMP_NUM_THREADS=1")
		if err != nil {
			return nil, err
		}
		defer p.stop()
		ranks[r] = p
	}
	for r, p := range ranks {
		switch line, err := p.next(startIn); {
		case err != nil:
			return nil, fmt.Errorf("rank %d before the fault: %w", r, err)
		case line != "ready":
			return nil, fmt.Errorf("rank %d before the fault: %s", r, line)
		}
	}
	for _, p := range ranks {
		fmt.Fprintln(p.in, cmdGo)
	}
	time.Sleep(c.After)
	at := time.Now()
	if err := l.happen(&c, ranks, server); err != nil {
		return nil, err
	}
	return c.collect(ranks, at)
}

// happen makes the fault happen.
func (l *Lab) happen(c *Case, ranks []*process, server *process) error {
	victim := ranks[c.Victim]
	here, there := c.Hosts[c.Victim], c.Hosts[c.Other]
	switch c.Fault {
	case Kill:
		return victim.cmd.Process.Kill()
	case Stop:
		return victim.signal("STOP")
	case Cut:
		return l.net.Cut(here, there)
	case Vanish:
		return l.net.Vanish(here)
	case Restart:
		return l.net.Restart(here, func() error {
			for r, p := range ranks {
				if c.Hosts[r] == here {
					p.stop()
				}
			}
			return nil
		})
	case SlowRank:
		return l.net.Slow(here)
	case SlowLink:
		return l.net.SlowLink(here, there)
	case Store:
		for _, p := range ranks {
			fmt.Fprintln(p.in, cmdWatch)
		}
		return server.cmd.Process.Kill()
	}
	_, err := fmt.Fprintln(victim.in, map[Fault]string{Panic: cmdPanic, Exit: cmdExit, Cancel: cmdCancel}[c.Fault])
	return err
}

// survives reports whether a rank has to say something of the fault.
func (c *Case) survives(r int) bool {
	switch c.Fault {
	case Kill, Stop, Panic, Exit, Cancel:
		return r != c.Victim
	case Vanish, Restart:
		return c.Hosts[r] != c.Hosts[c.Victim]
	}
	return true
}

// collect takes the reports of the survivors.
func (c *Case) collect(ranks []*process, at time.Time) (*Record, error) {
	limit := c.Fault.Timeout()
	x := &Record{Fault: c.Fault, Wire: c.Wire, Op: c.Op, Ranks: len(ranks), Timeout: limit.Seconds()}
	culprits := c.Culprits()
	var logs []string
	for r, p := range ranks {
		if !c.survives(r) {
			continue
		}
		x.Survivors++
		var said report
		line, err := p.next(time.Until(at.Add(limit + hangsAfter)))
		switch {
		case err == errHangs:
			x.Hangs = append(x.Hangs, r)
			continue
		case err != nil:
			x.Left = append(x.Left, fmt.Sprintf("rank %d: %v", r, err))
			continue
		}
		if err := json.Unmarshal([]byte(line), &said); err != nil {
			return nil, fmt.Errorf("rank %d says %q: %w", r, line, err)
		}
		x.Wrong = append(x.Wrong, said.Wrong...)
		logs = append(logs, said.Log)
		if said.Left != "" {
			x.Left = append(x.Left, fmt.Sprintf("rank %d left %s", r, said.Left))
		}
		switch {
		case said.GoesOn && len(culprits) == 0, slices.Contains(culprits, said.Blames):
			x.Named++
			if x.Says == "" {
				x.Says = said.Says
			}
		case said.Blames == "":
			x.Nobody++
			x.Says = said.Says
		default:
			x.Blames = append(x.Blames, fmt.Sprintf("rank %d blames %s: %s", r, said.Blames, said.Says))
		}
		if len(culprits) > 0 {
			x.Seconds = max(x.Seconds, said.At.Sub(at).Seconds())
		}
		if !c.GoOn || said.Leaves {
			continue
		}
		x.Rest++
		if said.Back.IsZero() {
			x.NotBack = append(x.NotBack, fmt.Sprintf("rank %d does not go on: %s", r, said.Ends))
			continue
		}
		x.Back++
		x.BackSeconds = max(x.BackSeconds, said.Back.Sub(at).Seconds())
	}
	if len(x.Blames) > 0 || x.Nobody > 0 {
		x.Logs = logs
	}
	return x, nil
}

// bytes is the size of a tensor of the table's cases.
func (c *Case) bytes() int {
	if c.Fault.isSlow() {
		return 4 << 20
	}
	return 64 << 10
}

// LeastRanks is the size of a group in which two ranks are a majority without the third.
const LeastRanks = 3

// CasesOf returns the cases of the table: every fault under every operation of size ranks on a wire.
func CasesOf(w Wire, size int, r *rand.Rand) (all []Case) {
	for _, f := range Faults {
		for _, op := range Operations {
			c := Case{Fault: f, Wire: w, Op: op, Hosts: hosts(w, size), Victim: 1, Other: 1, After: time.Duration(100+r.IntN(200)) * time.Millisecond}
			switch {
			case f.onNetwork() && w == Memory, f.isSlow() && strings.HasSuffix(op, "barrier"), w == Torch && (f == Cancel || op == "reduce_scatter"),
				(f == Vanish || f == Store) && op != "all_reduce" && op != "send_recv" && op != monitored: // they take long, and differ little
				continue
			case f == Cut || f == SlowLink:
				c.Victim = 0
			}
			c.GoOn = w != Torch && f != Store
			if op != monitored {
				c.Lines = tableScript(op, size, c.bytes())
			}
			all = append(all, c)
		}
	}
	return all
}

// tableScript repeats one operation on tensors of so many bytes.
func tableScript(op string, size, bytes int) (lines []script.Line) {
	for range 10 {
		for r := range size {
			l := script.Line{Op: op, Shape: []int{bytes / 4}}
			switch op {
			case "barrier":
				l.Shape = nil
			case "send_recv":
				l.Src, l.Dst, l.Tag = r, (r+1)%size, uint32(r)
			}
			lines = append(lines, l)
		}
	}
	return reparsed(lines, size)
}

// reparsed checks lines as a rank does.
func reparsed(lines []script.Line, size int) []script.Line {
	var text bytes.Buffer
	for _, l := range lines {
		json.NewEncoder(&text).Encode(l)
	}
	lines, err := script.Parse(&text, size)
	if err != nil {
		panic(err) // the lines are this package's own
	}
	return lines
}
