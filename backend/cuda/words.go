package cuda

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
)

// page is memory that processes of a host share: the words that order the streams
// of neighbours. The host writes them too, without asking a driver: that is how a
// stream goes on when nobody else will write the word that it waits for, whatever
// the driver is busy with.
type page struct {
	bytes []byte
	name  string // by which others may open it; "" if they cannot
	// forget takes the name away, unmap the memory; nil if there is nothing to do.
	forget, unmap func() error
}

const (
	pageSize = 4096
	nameLen  = 32 // in hex
)

// newPage returns a page of zeros.
func newPage() (*page, error) {
	var id [nameLen / 2]byte
	rand.Read(id[:])
	return createPage(id)
}

// openPage returns the page of another process.
func openPage(name string) (*page, error) {
	var id [nameLen / 2]byte
	if name == "" {
		return nil, errors.New("there is none")
	}
	if len(name) != nameLen {
		return nil, fmt.Errorf("no name of a page: %q", name)
	}
	if _, err := hex.Decode(id[:], []byte(name)); err != nil {
		return nil, fmt.Errorf("no name of a page: %q", name)
	}
	return mapPage(id)
}

// hide takes the page's name away.
func (p *page) hide() error {
	p.name = ""
	forget := p.forget
	p.forget = nil
	if forget == nil {
		return nil
	}
	return forget()
}

func (p *page) close() error {
	err := p.hide()
	if p.unmap != nil {
		err = errors.Join(err, p.unmap())
	}
	p.bytes, p.unmap = nil, nil
	return err
}
