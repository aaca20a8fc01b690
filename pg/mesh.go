package pg

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/c10d-go/c10d/internal/option"
)

// MeshDim is a dimension of a Mesh.
type MeshDim struct {
	Name string
	Size int
}

// Mesh arranges the ranks of a group in a grid, row by row. In each dimension a rank has a group: the ranks that differ
// from it in that coordinate only.
type Mesh struct {
	whole  *ProcessGroup
	dims   []MeshDim
	coord  []int
	o      GroupOptions
	groups map[string]*ProcessGroup
}

// NewMesh makes a mesh of all ranks of g, whose size is dims' product.
func NewMesh(ctx context.Context, g *ProcessGroup, dims []MeshDim, o ...GroupOptions) (*Mesh, error) {
	if !g.IsMember() {
		return nil, ErrNotMember
	}
	if len(dims) == 0 {
		return nil, errors.New("pg: NewMesh needs at least one dimension")
	}
	left := g.Size()
	for i, d := range dims {
		switch {
		case d.Name == "":
			return nil, fmt.Errorf("pg: NewMesh: dimension %d has no name", i)
		case slices.ContainsFunc(dims[:i], func(other MeshDim) bool { return other.Name == d.Name }):
			return nil, fmt.Errorf("pg: NewMesh: two dimensions have the name %q", d.Name)
		case d.Size < 1 || left%d.Size != 0:
			return nil, fmt.Errorf("pg: NewMesh: the sizes of %v do not multiply to %d, the size of group %q", dims, g.Size(), g.Name())
		}
		left /= d.Size
	}
	if left != 1 {
		return nil, fmt.Errorf("pg: NewMesh: the sizes of %v do not multiply to %d, the size of group %q", dims, g.Size(), g.Name())
	}
	m := &Mesh{whole: g, dims: slices.Clone(dims), o: option.Last(o), groups: make(map[string]*ProcessGroup)}
	m.coord = m.at(g.Rank())
	for _, d := range dims {
		if _, err := m.Flatten(ctx, d.Name, d.Name); err != nil {
			return nil, errors.Join(err, m.Close())
		}
	}
	return m, nil
}

// Close closes the mesh's groups, not the one that it was made of.
func (m *Mesh) Close() error {
	var errs []error
	for _, g := range m.groups {
		errs = append(errs, g.Close())
	}
	clear(m.groups)
	return errors.Join(errs...)
}

// at returns the coordinates of a rank.
func (m *Mesh) at(rank int) []int {
	c := make([]int, len(m.dims))
	for i := len(m.dims) - 1; i >= 0; i-- {
		c[i] = rank % m.dims[i].Size
		rank /= m.dims[i].Size
	}
	return c
}

// Dims returns the dimensions.
func (m *Mesh) Dims() []MeshDim { return slices.Clone(m.dims) }

// Coordinate returns this rank's place in each dimension.
func (m *Mesh) Coordinate() []int { return slices.Clone(m.coord) }

// Group returns this rank's group in a dimension, or of Flatten.
func (m *Mesh) Group(name string) (*ProcessGroup, error) {
	g, ok := m.groups[name]
	if !ok {
		return nil, fmt.Errorf("pg: the mesh %v has no group %q", m.dims, name)
	}
	return g, nil
}

// Flatten makes one group of several dimensions, with a name for Group.
func (m *Mesh) Flatten(ctx context.Context, name string, dims ...string) (*ProcessGroup, error) {
	if name == "" {
		return nil, errors.New("pg: Flatten: the group needs a name")
	}
	if _, ok := m.groups[name]; ok {
		return nil, fmt.Errorf("pg: Flatten: the mesh has a group %q already", name)
	}
	if len(dims) == 0 {
		return nil, errors.New("pg: Flatten needs at least one dimension")
	}
	free := make([]bool, len(m.dims))
	last := -1
	for _, d := range dims {
		i := slices.IndexFunc(m.dims, func(x MeshDim) bool { return x.Name == d })
		if i < 0 {
			return nil, fmt.Errorf("pg: Flatten: the mesh %v has no dimension %q", m.dims, d)
		}
		if i <= last {
			return nil, fmt.Errorf("pg: Flatten: dimensions %v are not in the order of the mesh %v", dims, m.dims)
		}
		free[i], last = true, i
	}
	g, err := m.whole.SplitRanks(ctx, m.lists(free), m.o)
	if err != nil {
		return nil, fmt.Errorf("pg: mesh group %q: %w", name, err)
	}
	m.groups[name] = g
	return g, nil
}

// lists returns the ranks of each group whose ranks differ in the free dimensions only.
func (m *Mesh) lists(free []bool) [][]int {
	index := make(map[string]int)
	var lists [][]int
	for r := range m.whole.Size() {
		c := m.at(r)
		for i, f := range free {
			if f {
				c[i] = 0
			}
		}
		key := fmt.Sprint(c)
		if _, ok := index[key]; !ok {
			index[key] = len(lists)
			lists = append(lists, nil)
		}
		lists[index[key]] = append(lists[index[key]], r)
	}
	return lists
}
