package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/c10d-go/c10d/backend/cuda"
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/tensor"
)

// anyDevice has the doctor look at GPUs where there are some.
const anyDevice = "auto"

// hostGPUs are the devices of a host as its first rank sees them.
type hostGPUs struct {
	Host    string     `json:"host"`
	Rank    int        `json:"rank"` // that looked
	Driver  string     `json:"driver"`
	Error   string     `json:"error,omitempty"` // what kept it from looking further
	Devices []deviceOf `json:"devices"`
	Links   []gpuLink  `json:"links"`
	Works   []string   `json:"all_reduce_works"` // ways of an all_reduce, the best first
}

// enoughQueues is CUDA's largest number of queues, which driver/nvidia asks for.
const enoughQueues = 32

// deviceOf describes one device.
type deviceOf struct {
	Index           int    `json:"index"`
	Name            string `json:"name"`
	PCI             string `json:"pci,omitempty"`
	Capability      string `json:"capability"`
	Multiprocessors int    `json:"multiprocessors"`
	CopyEngines     int    `json:"copy_engines"`
	Memory          uint64 `json:"memory"`
	Free            uint64 `json:"free"`
	NUMA            int    `json:"numa"`
	CUDA            string `json:"cuda"` // the version that the driver implements
	StreamValues    bool   `json:"stream_values"`
	Queues          int    `json:"queues,omitempty"` // that streams have, if the driver knows
}

// gpuLink is the link from one device to another.
type gpuLink struct {
	From    int    `json:"from"`
	To      int    `json:"to"`
	Peer    bool   `json:"peer"`
	Atomics bool   `json:"atomics"`
	Rank    int    `json:"rank"` // relative quality, 0 the best
	Error   string `json:"error,omitempty"`
}

// look opens the driver of the devices that were asked for. Missing is the reason why there
// is none.
func (d *doctor) look(on *devices) (at *gpu, missing string, err error) {
	if d.device != anyDevice {
		at, err = on.open()
		return at, "", err
	}
	switch _, err := cuda.Default(); {
	case errors.Is(err, driver.ErrNoDevice):
		return nil, err.Error(), nil
	case err != nil:
		return nil, fmt.Sprintf("the driver cannot be used: %v", err), nil
	}
	at, err = (&devices{kind: onCUDA}).open()
	return at, "", err
}

// examineGPUs has the first rank of each host with devices look at them, and all
// ranks make a group for tensors on them, which explains itself.
func (d *doctor) examineGPUs(ctx context.Context, g *pg.ProcessGroup, at *gpu, ranks []rankInfo) ([]rankInfo, []hostGPUs, error) {
	me := ranks[g.Rank()]
	var own hostGPUs
	first := slices.IndexFunc(ranks, func(p rankInfo) bool { return p.Host == me.Host && p.GPUs > 0 })
	if first == g.Rank() {
		own = at.examine()
		own.Host, own.Rank = me.Host, me.Rank
	}
	seen, err := pg.AllGatherObject(ctx, g, own)
	if err != nil {
		return nil, nil, err
	}
	seen = slices.DeleteFunc(seen, func(h hostGPUs) bool { return h.Host == "" })
	everyone := make([]int, g.Size())
	for i := range everyone {
		everyone[i] = i
	}
	group, err := g.NewGroup(ctx, everyone, pg.GroupOptions{Backend: "cuda:" + cuda.Name})
	if err == nil && !slices.ContainsFunc(ranks, func(p rankInfo) bool { return p.GPUs == 0 }) {
		err = d.tryGPUs(ctx, g, group, at)
	}
	if err != nil {
		me.NoGroup = err.Error()
	}
	if group != nil {
		me.Groups = append(me.Groups, group.Explain()...)
	}
	if ranks, err = pg.AllGatherObject(ctx, g, me); err != nil {
		return nil, nil, err
	}
	if group != nil {
		// One that has failed has said so.
		if err := group.Close(); err != nil && me.NoGroup == "" {
			return nil, nil, err
		}
	}
	return ranks, seen, nil
}

// tryGPUs runs the all_reduce by which the group finds out what its devices can do.
func (d *doctor) tryGPUs(ctx context.Context, g, group *pg.ProcessGroup, at *gpu) error {
	if err := at.take(ctx, g, besideStream); err != nil {
		group.Abort(err)
		return err
	}
	t, err := at.tensor(tensor.Float32, 1)
	if err != nil {
		group.Abort(err)
		return err
	}
	w, err := group.AllReduce(at.context(ctx), t, pg.Sum(), pg.CallOptions{Timeout: d.timeout})
	if err != nil {
		group.Abort(err)
		return err
	}
	return w.Wait(ctx)
}

// examine looks at all devices of the driver.
func (g *gpu) examine() hostGPUs {
	h := hostGPUs{Driver: g.driver.Name(), Works: cuda.AllReduceWorks()}
	for i := range g.driver.Count() {
		v, err := g.driver.Device(i)
		if err != nil {
			h.Error = err.Error()
			return h
		}
		free, total, err := v.MemInfo()
		if err != nil {
			h.Error = err.Error()
			return h
		}
		info := v.Info()
		h.Devices = append(h.Devices, deviceOf{
			Index: i, Name: info.Name, PCI: info.PCI, Capability: fmt.Sprintf("%d.%d", info.Major, info.Minor),
			Multiprocessors: info.Multiprocessors, CopyEngines: info.CopyEngines, Memory: total, Free: free, NUMA: info.NUMA,
			CUDA: fmt.Sprintf("%d.%d", info.Driver/1000, info.Driver%1000/10), StreamValues: info.StreamValues,
		})
		if q, ok := v.(driver.Queuer); ok {
			_, h.Devices[i].Queues = q.Queues()
		}
	}
	for from := range h.Devices {
		for to := range h.Devices {
			if from == to {
				continue
			}
			l, err := g.driver.Link(from, to)
			link := gpuLink{From: from, To: to, Peer: l.Peer, Atomics: l.Atomics, Rank: l.Rank}
			if err != nil {
				link.Error = err.Error()
			}
			h.Links = append(h.Links, link)
		}
	}
	return h
}

// String is the link for people.
func (l gpuLink) String() string {
	switch {
	case l.Error != "":
		return "?"
	case !l.Peer:
		return "host"
	}
	s := "peer"
	if !l.Atomics {
		s += ", no atomics"
	}
	if l.Rank > 0 {
		s += fmt.Sprintf(", rank %d", l.Rank)
	}
	return s
}

func (h *hostGPUs) write(out io.Writer) error {
	fmt.Fprintf(out, "\nGPUs of host %s, driver %s, implementations of all_reduce: %s\n", h.Host, h.Driver, strings.Join(h.Works, ", "))
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "  gpu\tname\tat\tcapability\tSMs\tcopy engines\tfree of GB\tNUMA\tCUDA")
	for _, v := range h.Devices {
		fmt.Fprintf(w, "  %d\t%s\t%s\t%s\t%d\t%d\t%.1f of %.1f\t%d\t%s\n", v.Index, v.Name, v.PCI, v.Capability, v.Multiprocessors, v.CopyEngines,
			float64(v.Free)/1e9, float64(v.Memory)/1e9, v.NUMA, v.CUDA)
	}
	if len(h.Links) > 0 {
		fmt.Fprint(w, "  from, to")
		for _, v := range h.Devices {
			fmt.Fprintf(w, "\t%d", v.Index)
		}
		next := 0
		for from := range h.Devices {
			fmt.Fprintf(w, "\n  %d", from)
			for to := range h.Devices {
				if from == to {
					fmt.Fprint(w, "\t-")
					continue
				}
				fmt.Fprintf(w, "\t%v", h.Links[next])
				next++
			}
		}
		fmt.Fprintln(w)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if h.Error != "" {
		fmt.Fprintf(out, "  the devices could not be examined further: %s\n", h.Error)
	}
	return nil
}

// gpuAdvice lists possible improvements of the devices.
func gpuAdvice(ranks []rankInfo, hosts []hostGPUs) []string {
	var all []string
	add := func(format string, args ...any) { all = append(all, fmt.Sprintf(format, args...)) }
	if len(hosts) == 0 {
		return nil
	}
	perHost, fewest := map[string]int{}, map[string]int{}
	for _, p := range ranks {
		perHost[p.Host]++
		if n, ok := fewest[p.Host]; !ok || p.GPUs < n {
			fewest[p.Host] = p.GPUs
		}
		switch {
		case p.GPUs == 0:
			add("rank %d has no GPU: %s", p.Rank, p.NoGPU)
		case p.NoGroup != "":
			add("rank %d could not join a group for tensors on GPUs: %s", p.Rank, p.NoGroup)
		}
	}
	for _, h := range hosts {
		// A rank that sees one device only has been given it.
		if n := fewest[h.Host]; n > 1 && perHost[h.Host] > n {
			add("host %s has %d ranks on %d GPUs, which they share", h.Host, perHost[h.Host], n)
		}
		if h.Error != "" {
			add("the GPUs of host %s cannot be used: %s", h.Host, h.Error)
		}
		for _, v := range h.Devices {
			if 0 < v.Queues && v.Queues < enoughQueues {
				add("streams of GPU %d of host %s share %d queues, so a stream that waits for other ranks delays other streams: set CUDA_DEVICE_MAX_CONNECTIONS=%d", v.Index, h.Host, v.Queues, enoughQueues)
			}
			if !v.StreamValues {
				add("streams of GPU %d of host %s cannot wait for values: operations on its tensors need this", v.Index, h.Host)
			}
			if v.CUDA != h.Devices[0].CUDA {
				add("GPU %d of host %s has a driver for CUDA %s, GPU 0 one for %s", v.Index, h.Host, v.CUDA, h.Devices[0].CUDA)
			}
		}
		var apart []string
		for _, l := range h.Links {
			if !l.Peer && l.From < l.To {
				apart = append(apart, fmt.Sprintf("%d and %d", l.From, l.To))
			}
		}
		if len(apart) > 0 {
			add("on host %s these GPUs cannot reach each other's memory, so data between them goes through CPU memory: %s", h.Host, strings.Join(apart, "; "))
		}
	}
	return all
}
