package cluster

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/c10d-go/c10d/internal/ownfile"
)

// get takes a plan from its file, or makes it.
func (c *Cache) get(x Call, k key) (*Plan, error) {
	file := ""
	if c.dir != "" {
		file = filepath.Join(c.dir, c.name(k))
		text, err := ownfile.Read(file, maxFile+1)
		if err == nil {
			p, err := c.l.Import(bytes.NewReader(text))
			if err == nil && keyOf(p.Call) != k {
				err = errors.New("cluster: it is the plan of another call")
			}
			if err != nil {
				return nil, fmt.Errorf("%s: %w", file, err)
			}
			return p, nil
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("cluster: plan: %w", err)
		}
	}
	p, err := c.l.Plan(x)
	if err == nil {
		c.solved.Add(1)
	}
	if err != nil || file == "" {
		return p, err
	}
	if err := c.write(file, p); err != nil {
		return nil, fmt.Errorf("cluster: plan: %w", err)
	}
	return p, nil
}

// name returns the name of a plan's file. It differs for everything that a plan depends on.
func (c *Cache) name(k key) string {
	h := sha256.Sum256(fmt.Appendf(nil, "%d %v %v %+v", fileVersion, c.l.cluster, c.l.weights, k))
	return fmt.Sprintf("%v-%d-rank%d-%x.plan", k.op, k.bytes, k.rank, h[:6])
}

// write writes a file that nobody sees before it is whole.
func (c *Cache) write(file string, p *Plan) error {
	var text bytes.Buffer
	if err := c.l.Export(&text, p); err != nil {
		return err
	}
	return ownfile.Replace(file, text.Bytes())
}
