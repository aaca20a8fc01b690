package main

import (
	"fmt"

	"github.com/c10d-go/c10d/internal/script"
)

// jobs returns the jobs of a run in order. Those with one script stand together,
// the one of PyTorch ranks alone first: it is what the others are held against.
func jobs(v version, taken []script.Line, seed uint64, short bool) [][]job {
	var all [][]job
	matrix := func(size int, lines []script.Line) {
		js := []job{
			{Name: "PyTorch alone"},
			{Kind: fmt.Sprintf("%d ranks, Go alone", size), Name: "Go alone", Go: others(size)},
		}
		for r := range size {
			js = append(js, job{Kind: fmt.Sprintf("%d ranks, one of Go, in every place", size), Name: fmt.Sprintf("Go on %d", r), Go: []int{r}})
		}
		for r := 0; r < size && size > 2; r++ {
			js = append(js, job{Kind: fmt.Sprintf("%d ranks, one of PyTorch, in every place", size), Name: fmt.Sprintf("PyTorch on %d", r), Go: others(size, r)})
		}
		for i := range js {
			js[i].Size, js[i].Store, js[i].lines = size, storeRank0, lines
		}
		all = append(all, js)
	}
	if short {
		matrix(2, sample(v, taken, 2))
	} else {
		for size := 2; size <= 5; size++ {
			matrix(size, full(v, taken, size))
		}
	}

	around := []job{
		{Name: "PyTorch alone", Store: storeRank0},
		{Name: "store: c10d store", Store: storeServer},
		{Name: "store: torchrun", Store: storeTorchrun},
		{Name: "store: shared file", Store: storeFile},
		{Name: "TORCH_DIST_INIT_BARRIER=1", Store: storeRank0, Env: []string{"TORCH_DIST_INIT_BARRIER=1"}},
		{Name: "two devices", Store: storeRank0, Env: []string{"GLOO_SOCKET_IFNAME=lo,lo"}},
		{Name: "no GLOO_SOCKET_IFNAME", Store: storeRank0, Env: []string{"GLOO_SOCKET_IFNAME="}},
		{Name: "IPv6", Store: storeRank0, IPv6: true},
	}
	if v >= 207 {
		around = append(around, job{Name: "TORCH_GLOO_LAZY_INIT=1", Store: storeRank0, Env: []string{"TORCH_GLOO_LAZY_INIT=1"}})
	}
	lines := sample(v, taken, 3)
	for i := range around {
		around[i].Size, around[i].lines = 3, lines
		if i > 0 {
			around[i].Kind = "3 ranks, " + around[i].Name
			around[i].Go = []int{i % 3}
			if i%2 == 0 {
				around[i].Go = others(3, i%3)
			}
		}
	}
	all = append(all, around)

	lines = random(v, taken, 4, 500, seed)
	chance := fmt.Sprintf("500 random lines, seed %d", seed)
	const kind = "4 ranks, 500 random lines"
	return append(all, []job{
		{Name: "PyTorch alone", Size: 4, Store: storeRank0, lines: lines},
		{Kind: kind, Name: chance + ", Go on 1 and 3", Size: 4, Go: []int{1, 3}, Store: storeRank0, lines: lines},
		{Kind: kind, Name: chance + ", Go on 0", Size: 4, Go: []int{0}, Store: storeServer, lines: lines},
	})
}

// others returns the ranks of a world but some.
func others(size int, but ...int) []int {
	var rs []int
	for r := range size {
		if len(but) == 0 || r != but[0] {
			rs = append(rs, r)
		}
	}
	return rs
}
