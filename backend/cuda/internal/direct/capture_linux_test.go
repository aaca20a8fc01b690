//go:build amd64 || arm64

package direct_test

import (
	"fmt"
	"runtime"

	"github.com/ebitengine/purego"
)

// graphs is the part of CUDA's driver that captures streams in graphs.
type graphs struct {
	retain func(ctx *uintptr, device int32) int32
	set    func(ctx uintptr) int32
	begin  func(stream uintptr, mode int32) int32
	end    func(stream uintptr, graph *uintptr) int32
	make   func(exec *uintptr, graph uintptr, flags uint64) int32
	launch func(exec, stream uintptr) int32
}

func openGraphs() (g graphs, err error) {
	h, err := purego.Dlopen("libcuda.so.1", purego.RTLD_NOW|purego.RTLD_GLOBAL)
	if err != nil {
		return g, err
	}
	for name, f := range map[string]any{
		"cuDevicePrimaryCtxRetain": &g.retain, "cuCtxSetCurrent": &g.set, "cuStreamBeginCapture_v2": &g.begin, "cuStreamEndCapture": &g.end,
		"cuGraphInstantiateWithFlags": &g.make, "cuGraphLaunch": &g.launch,
	} {
		purego.RegisterLibFunc(f, h, name)
	}
	return g, nil
}

// capture makes a graph of what enqueue gives the stream, and returns what launches it.
func (m *member) capture(enqueue func() error) (launch func() error, err error) {
	g, err := openGraphs()
	if err != nil {
		return nil, err
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var ctx, graph, exec uintptr
	const relaxed = 2
	var code int32
	do := func(c int32) {
		if code == 0 {
			code = c
		}
	}
	do(g.retain(&ctx, int32(m.rank)))
	do(g.set(ctx))
	do(g.begin(m.s.Handle(), relaxed))
	if code == 0 {
		err = enqueue()
		do(g.end(m.s.Handle(), &graph))
	}
	if err == nil && code == 0 {
		do(g.make(&exec, graph, 0))
	}
	if err == nil && code != 0 {
		err = fmt.Errorf("capturing: CUDA's error %d", code)
	}
	return func() error {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		g.set(ctx)
		if code := g.launch(exec, m.s.Handle()); code != 0 {
			return fmt.Errorf("launching a graph: CUDA's error %d", code)
		}
		return nil
	}, err
}
