package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/backend/nccl"
	"github.com/c10d-go/c10d/internal/credentials"
	"github.com/c10d-go/c10d/internal/launch/agent"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/tensor"
)

func init() {
	register(command{
		name: "doctor", summary: "print how the ranks of a group reach each other, and how fast", example: "c10d doctor -world 4", setup: setupDoctor,
	})
}

// doctor is the flags of "c10d doctor".
type doctor struct {
	world      int
	init, wire string
	device     string
	json       bool
	links      bool
	timeout    time.Duration
}

func setupDoctor(fs *flag.FlagSet) func(stdio, []string) (int, error) {
	var d doctor
	fs.IntVar(&d.world, "world", 0, "start `n` local ranks; 0 means that this is one rank of a job, see -init")
	fs.StringVar(&d.init, "init", "env://", "`URL` of the job's store: env://, tcp://, file:// or redis://")
	fs.StringVar(&d.wire, "wire", "", "`wire`: auto, gloo, native or tcp"+wireDefault)
	fs.StringVar(&d.device, "device", anyDevice, "`kind` of devices to examine: auto (GPUs if there are any), cpu (none), cuda, or sim (GPUs in software)")
	fs.BoolVar(&d.json, "json", false, "print one JSON object")
	fs.BoolVar(&d.links, "links", true, "measure time and bandwidth between each two ranks")
	fs.DurationVar(&d.timeout, "timeout", time.Minute, "longest `duration` to wait for ranks")
	return func(std stdio, args []string) (int, error) {
		if len(args) > 0 {
			return 0, usagef("unexpected argument %q", args[0])
		}
		if d.world < 0 || d.timeout <= 0 {
			return 0, usagef("-world %d and -timeout %v: -world must not be negative, -timeout must be positive", d.world, d.timeout)
		}
		wire, err := wireOf(d.wire)
		if err != nil {
			return 0, usagef("-wire: %v", err)
		}
		var on devices
		if d.device != anyDevice {
			if err := on.Set(d.device); err != nil || len(on.index) > 0 {
				return 0, usagef("-device %q is not auto, cpu, cuda or sim", d.device)
			}
		}
		if d.world > 0 {
			return d.launch(std, &on)
		}
		return 0, d.run(std, wire, &on)
	}
}

// launch starts the ranks on this host.
func (d *doctor) launch(std stdio, on *devices) (int, error) {
	if err := on.check(); err != nil {
		return 0, err
	}
	return runLocal(std, d.world, []string{
		"doctor", "-wire", d.wire, fmt.Sprintf("-json=%t", d.json), fmt.Sprintf("-links=%t", d.links), "-timeout", d.timeout.String(),
		"-device", d.device,
	})
}

// runLocal runs a command of this program as every rank of a job on this host. The environment may name files
// that protect the job, as for other ranks.
func runLocal(std stdio, ranks int, args []string) (int, error) {
	self, err := os.Executable()
	if err != nil {
		return 1, err
	}
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	defer signal.Stop(signals)
	s, err := agent.Run(context.Background(), agent.Job{
		Procs: ranks, Nodes: 1, Command: append([]string{self}, args...), NoPrefix: true, Grace: time.Second,
		Stdout: std.out, Stderr: std.err, Guard: []string{self, "guard"}, Signals: signals,
		Meeting: agent.DefaultMeeting, Logf: func(string, ...any) {}, Secrets: credentials.FromEnv(os.Getenv),
	})
	if err != nil {
		return 1, err
	}
	if s.Signal == "SIGQUIT" {
		quit()
	}
	if !s.OK && s.Signal == "" {
		fmt.Fprint(std.err, s.Report())
	}
	return s.ExitCode, nil
}

// rankInfo is the description that a rank gives of itself.
type rankInfo struct {
	Rank       int                   `json:"rank"`
	Host       string                `json:"host"`
	PID        int                   `json:"pid"`
	System     string                `json:"system"`
	Go         string                `json:"go"`
	Program    string                `json:"program"`
	CPUs       int                   `json:"cpus"` // that the rank may use
	Congestion string                `json:"tcp_congestion_control,omitempty"`
	Joined     float64               `json:"joined_ms"` // how long it took to join the group
	Groups     []backend.Explanation `json:"explain"`

	GPUs    int    `json:"gpus"`                      // that the rank may use
	NoGPU   string `json:"no_gpu,omitempty"`          // why there is none
	Visible string `json:"visible,omitempty"`         // CUDA_VISIBLE_DEVICES
	NoGroup string `json:"no_device_group,omitempty"` // why no group for devices could be made
	NCCL    string `json:"nccl,omitempty"`            // the version that backend nccl finds, and where
	NoNCCL  string `json:"no_nccl,omitempty"`         // why it finds none
}

// diagnosis is what "c10d doctor -json" prints.
type diagnosis struct {
	Ranks  []rankInfo `json:"ranks"`
	GPUs   []hostGPUs `json:"gpus,omitempty"` // of each host that has some
	Links  []linkTime `json:"links,omitempty"`
	Advice []string   `json:"advice"`
}

// linkTime is the time and bandwidth between two ranks.
type linkTime struct {
	A          int     `json:"a"`
	B          int     `json:"b"`
	Over       string  `json:"over"`       // shm or tcp, as a explains it
	OneWay     float64 `json:"one_way_us"` // half a round trip of 8 bytes
	Throughput float64 `json:"gb_per_s"`   // of messages of 4 MiB in one direction
}

func (d *doctor) run(std stdio, wire gloo.Wire, on *devices) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	at, missing, err := d.look(on)
	if err != nil {
		return err
	}
	if err := useWire(d.wire); err != nil {
		return err
	}
	o := pg.Options{Timeout: d.timeout, Backend: "cpu:" + gloo.Name, BackendOptions: pg.BackendOptions{gloo.Options{Wire: wire}}}
	if at != nil {
		o.BackendOptions = append(o.BackendOptions, cuda.Options{Driver: at.driver})
	}
	begun := time.Now()
	g, err := pg.Init(ctx, d.init, pg.InitOptions{Options: o})
	if err != nil {
		return errors.Join(orWorld(err), at.free())
	}
	err = d.examine(ctx, g, at, missing, time.Since(begun), std.out)
	if err != nil {
		g.Abort(err)
	}
	return errors.Join(err, g.Close(), at.free())
}

func (d *doctor) examine(ctx context.Context, g *pg.ProcessGroup, at *gpu, missing string, joined time.Duration, out io.Writer) error {
	me := rankInfo{
		Rank: g.Rank(), PID: os.Getpid(), System: runtime.GOOS + "/" + runtime.GOARCH, Go: runtime.Version(),
		Program: version(), CPUs: runtime.NumCPU(), Joined: float64(joined.Microseconds()) / 1000, Groups: g.Explain(),
		NoGPU: missing, Visible: os.Getenv("CUDA_VISIBLE_DEVICES"),
	}
	me.Host, _ = os.Hostname()
	if at != nil {
		me.GPUs = at.driver.Count()
		if path, version, err := nccl.Library(""); err != nil {
			me.NoNCCL = err.Error()
		} else {
			me.NCCL = version + ", " + path
		}
	}
	if b, err := os.ReadFile("/proc/sys/net/ipv4/tcp_congestion_control"); err == nil {
		me.Congestion = strings.TrimSpace(string(b))
	}
	ranks, err := pg.AllGatherObject(ctx, g, me)
	if err != nil {
		return err
	}
	var all diagnosis
	if slices.ContainsFunc(ranks, func(p rankInfo) bool { return p.GPUs > 0 }) {
		if ranks, all.GPUs, err = d.examineGPUs(ctx, g, at, ranks); err != nil {
			return err
		}
	}
	all.Ranks, all.Advice = ranks, append(advice(ranks), gpuAdvice(ranks, all.GPUs)...)
	if d.links {
		for _, pair := range pairs(g.Size()) {
			var own linkTime
			if g.Rank() == pair[0] || g.Rank() == pair[1] {
				if own, err = measureLink(ctx, g, pair); err != nil {
					return err
				}
			}
			heard, err := pg.BroadcastObject(ctx, g, []linkTime{own}, pair[0])
			if err != nil {
				return err
			}
			l := heard[0]
			l.Over = over(ranks[l.A], l.B)
			all.Links = append(all.Links, l)
		}
	}
	if g.Rank() != 0 {
		return nil
	}
	if d.json {
		return json.NewEncoder(out).Encode(all)
	}
	return all.write(out)
}

// allPairs is the largest group in which every pair is measured. In larger groups each rank
// is measured with the next.
const allPairs = 8

func pairs(size int) [][2]int {
	var all [][2]int
	for a := range size {
		for b := a + 1; b < size; b++ {
			if size <= allPairs || b == a+1 || a == 0 && b == size-1 {
				all = append(all, [2]int{a, b})
			}
		}
	}
	return all
}

const (
	trips      = 200
	bulk       = 8
	bulkBytes  = 4 << 20
	smallBytes = 8
)

// measureLink runs on both ranks of a pair.
func measureLink(ctx context.Context, g *pg.ProcessGroup, pair [2]int) (linkTime, error) {
	l := linkTime{A: pair[0], B: pair[1]}
	peer, first := pair[1], true
	if g.Rank() == pair[1] {
		peer, first = pair[0], false
	}
	small, err := tensor.New(tensor.Uint8, smallBytes)
	if err != nil {
		return l, err
	}
	large, err := tensor.New(tensor.Uint8, bulkBytes)
	if err != nil {
		return l, err
	}
	send := func(t *tensor.Tensor) error {
		w, err := g.Send(ctx, t, peer)
		if err != nil {
			return err
		}
		return w.Wait(ctx)
	}
	recv := func(t *tensor.Tensor) error {
		w, err := g.Recv(ctx, t, peer)
		if err != nil {
			return err
		}
		return w.Wait(ctx)
	}
	// do sends one way and back, in the order that the pair gives.
	do := func(there, back *tensor.Tensor) error {
		if first {
			return errors.Join(send(there), recv(back))
		}
		return errors.Join(recv(there), send(back))
	}
	times := make([]time.Duration, 0, trips)
	for range trips {
		begun := time.Now()
		if err := do(small, small); err != nil {
			return l, err
		}
		times = append(times, time.Since(begun))
	}
	slices.Sort(times)
	l.OneWay = times[trips/2].Seconds() / 2 * 1e6
	best := time.Duration(0)
	for range bulk {
		begun := time.Now()
		if err := do(large, small); err != nil {
			return l, err
		}
		if took := time.Since(begun); best == 0 || took < best {
			best = took
		}
	}
	l.Throughput = bulkBytes / best.Seconds() / 1e9
	return l, nil
}

// over returns the transport between two ranks.
func over(p rankInfo, other int) string {
	for _, e := range p.Groups {
		if i := slices.IndexFunc(e.Links, func(l backend.Link) bool { return l.Rank == other }); e.Backend == gloo.Name && i >= 0 {
			return e.Links[i].Transport
		}
	}
	return "?"
}

// advice lists possible improvements of a group.
func advice(ranks []rankInfo) []string {
	var all []string
	add := func(format string, args ...any) { all = append(all, fmt.Sprintf(format, args...)) }
	perHost := map[string]int{}
	for _, p := range ranks {
		perHost[p.Host]++
	}
	crowded := map[string]bool{}
	for _, p := range ranks {
		if perHost[p.Host] > p.CPUs && !crowded[p.Host] {
			crowded[p.Host] = true
			add("host %s has %d ranks on %d CPUs: small operations take longer, because waiting ranks share the CPUs", p.Host, perHost[p.Host], p.CPUs)
		}
		if p.Program != ranks[0].Program {
			add("rank %d runs %s, rank 0 %s", p.Rank, p.Program, ranks[0].Program)
		}
		if v, zero := ncclVersion(p), ncclVersion(ranks[0]); v != zero {
			add("rank %d has %s, rank 0 %s: groups of backend nccl need the same version on all ranks", p.Rank, v, zero)
		}
		for i, e := range p.Groups {
			if p.Rank == 0 && e.Wire == string(gloo.WireGloo) && e.Size > 1 {
				add("%s uses Gloo's wire: %s", e.Backend, e.Why)
			}
			if i < len(ranks[0].Groups) && e.Wire != ranks[0].Groups[i].Wire {
				add("rank %d says %s has the %s wire, rank 0 the %s wire", p.Rank, e.Backend, e.Wire, ranks[0].Groups[i].Wire)
			}
		}
	}
	return all
}

// ncclVersion says which NCCL a rank has.
func ncclVersion(p rankInfo) string {
	if version, _, found := strings.Cut(p.NCCL, ","); found {
		return "NCCL " + version
	}
	return "no NCCL"
}

func (d *diagnosis) write(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "rank\thost\tpid\tCPUs\tsystem\tprogram\tjoined in")
	for _, p := range d.Ranks {
		fmt.Fprintf(w, "%d\t%s\t%d\t%d\t%s, %s\t%s\t%.1f ms\n", p.Rank, p.Host, p.PID, p.CPUs, p.System, p.Go, p.Program, p.Joined)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for _, e := range d.Ranks[0].Groups {
		fmt.Fprintf(out, "\n%v", e)
	}
	for _, h := range d.GPUs {
		if err := h.write(out); err != nil {
			return err
		}
	}
	if d.Ranks[0].NCCL != "" {
		fmt.Fprintf(out, "\nNCCL for backend nccl on rank 0: %s\n", d.Ranks[0].NCCL)
	} else if why := d.Ranks[0].NoNCCL; why != "" {
		fmt.Fprintf(out, "\nno NCCL for rank 0: %s\n", why)
	}
	if why := d.Ranks[0].NoGPU; why != "" {
		fmt.Fprintf(out, "\nno GPUs for rank 0: %s\n", why)
	}
	if len(d.Links) > 0 {
		fmt.Fprintln(out, "\npoint to point")
		w = tabwriter.NewWriter(out, 0, 8, 2, ' ', tabwriter.AlignRight)
		fmt.Fprintln(w, "ranks\tover\tone way us\tGB/s\t")
		for _, l := range d.Links {
			fmt.Fprintf(w, "%d-%d\t%s\t%.1f\t%.2f\t\n", l.A, l.B, l.Over, l.OneWay, l.Throughput)
		}
		if err := w.Flush(); err != nil {
			return err
		}
	}
	fmt.Fprintln(out)
	for _, a := range d.Advice {
		fmt.Fprintln(out, "note:", a)
	}
	if len(d.Advice) == 0 {
		fmt.Fprintln(out, "no advice")
	}
	return nil
}
