package main

import (
	"fmt"
	"slices"

	"github.com/c10d-go/c10d/internal/script"
)

// quickPlace is the job of the matrix that quick runs have, by the size of the group. Gloo's algorithms
// differ on the first, a middle and the last rank, and for groups of 2^n and of other sizes.
var quickPlace = map[int]string{2: "Go on 0", 3: "PyTorch on 1", 4: "Go on 3", 5: "Go on 2"}

// jobs returns the jobs of a run in order. Jobs with one script are together. The first one has
// PyTorch ranks alone, and the others are compared with it. quick leaves out jobs that repeat others in
// other places, short much more.
func jobs(v version, taken []script.Line, seed uint64, quick, short bool) [][]job {
	var all [][]job
	matrix := func(size int, lines []script.Line) {
		places := "in every place"
		if quick {
			places = "in one place"
		}
		js := []job{
			{Name: "PyTorch alone"},
			{Kind: fmt.Sprintf("%d ranks, Go alone", size), Name: "Go alone", Go: others(size)},
		}
		for r := range size {
			js = append(js, job{Kind: fmt.Sprintf("%d ranks, one of Go, %s", size, places), Name: fmt.Sprintf("Go on %d", r), Go: []int{r}})
		}
		for r := 0; r < size && size > 2; r++ {
			js = append(js, job{Kind: fmt.Sprintf("%d ranks, one of PyTorch, %s", size, places), Name: fmt.Sprintf("PyTorch on %d", r), Go: others(size, r)})
		}
		for i := range js {
			js[i].Size, js[i].Store, js[i].lines = size, storeRank0, lines
			js[i].Again = i > 0 && js[i].Name != quickPlace[size]
		}
		all = append(all, js)
	}
	if short {
		matrix(2, sample(v, taken, 2))
	} else {
		for size := 2; size <= 5; size++ {
			lines := full(v, taken, size)
			if quick && size > 3 {
				lines = sample(v, taken, size)
			}
			matrix(size, lines)
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

	all = append(all, groupsInGroups(v, taken)...)
	all = append(all, compared(v, taken)...)

	lines = random(v, taken, 4, 500, seed)
	chance := fmt.Sprintf("500 random lines, seed %d", seed)
	const kind = "4 ranks, 500 random lines"
	all = append(all, []job{
		{Name: "PyTorch alone", Size: 4, Store: storeRank0, lines: lines},
		{Kind: kind, Name: chance + ", Go on 1 and 3", Size: 4, Go: []int{1, 3}, Store: storeRank0, lines: lines},
		{Kind: kind, Name: chance + ", Go on 0", Size: 4, Go: []int{0}, Store: storeServer, lines: lines, Again: true},
	})
	if quick {
		for i, js := range all {
			all[i] = slices.DeleteFunc(js, func(j job) bool { return j.Again })
		}
	}
	return all
}

// groupsInGroups returns the jobs with groups inside groups. PyTorch can make them locally since
// 2.1.
func groupsInGroups(v version, taken []script.Line) [][]job {
	const size = 5
	all := [][]job{{
		{Name: "PyTorch alone"},
		{Name: "Go alone", Go: others(size), Again: true},
		{Name: "Go on 0", Go: []int{0}, Again: true},
		{Name: "Go on 3", Go: []int{3}},
		{Name: "Go on 4, outside", Go: []int{4}},
		{Name: "PyTorch on 1", Go: others(size, 1)},
	}}
	if v >= 201 {
		all = append(all, []job{
			{Name: "PyTorch alone"},
			{Name: "made locally, Go on 3", Go: []int{3}, Again: true},
			{Name: "made locally, PyTorch on 1", Go: others(size, 1)},
			{Name: "made locally, TORCH_DIST_INIT_BARRIER=1, Go on 0", Go: []int{0}, Env: []string{"TORCH_DIST_INIT_BARRIER=1"}},
		})
	}
	for n, js := range all {
		lines := inGroups(v, taken, size, n > 0)
		for i := range js {
			if i > 0 {
				js[i].Kind = fmt.Sprintf("%d ranks, groups in groups", size)
				js[i].Name = "groups in groups, " + js[i].Name
			}
			js[i].Size, js[i].Store, js[i].lines = size, storeRank0, lines
		}
	}
	return all
}

// detail is the variable under which ranks compare their collectives first.
const detail = "TORCH_DISTRIBUTED_DEBUG=DETAIL"

// compared returns the jobs whose ranks compare every collective before they run it.
func compared(v version, taken []script.Line) [][]job {
	three := inDetail(v, sample(v, taken, 3), 3)
	four := inDetail(v, inGroups(v, taken, 4, false), 4)
	all := [][]job{{
		{Name: "PyTorch alone", Size: 2},
		{Name: "Go alone", Size: 2, Go: others(2), Again: true},
		{Name: "Go on 0", Size: 2, Go: []int{0}, Again: true},
		{Name: "Go on 1", Size: 2, Go: []int{1}},
	}, {
		{Name: "PyTorch alone", Size: 3},
		{Name: "Go alone", Size: 3, Go: others(3), Again: true},
		{Name: "Go on 1", Size: 3, Go: []int{1}},
		{Name: "PyTorch on 0", Size: 3, Go: others(3, 0), Again: true},
		{Name: "torchrun, Go on 2", Size: 3, Go: []int{2}, Store: storeTorchrun, Again: true},
		{Name: "shared file, Go on 0", Size: 3, Go: []int{0}, Store: storeFile, Again: true},
	}, {
		{Name: "PyTorch alone", Size: 4},
		{Name: "groups in groups, Go on 2", Size: 4, Go: []int{2}, Again: true},
		{Name: "groups in groups, PyTorch on 3", Size: 4, Go: others(4, 3), Store: storeServer},
	}}
	for n, lines := range [][]script.Line{inDetail(v, sample(v, taken, 2), 2), three, four} {
		for i := range all[n] {
			j := &all[n][i]
			if i > 0 {
				j.Kind = fmt.Sprintf("%d ranks, %s", j.Size, detail)
				j.Name = "DETAIL, " + j.Name
			}
			if j.Store == "" {
				j.Store = storeRank0
			}
			j.Env, j.lines = []string{detail}, lines
		}
	}
	return all
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
