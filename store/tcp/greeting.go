package tcp

import (
	"encoding/binary"
	"errors"
	"fmt"
)

var (
	// ErrOtherJob is matched by the error of a client whose Options.Job differs from the server's
	// ServerOptions.Job.
	ErrOtherJob = errors.New("the store belongs to another job")

	// ErrRestarted is matched by the error of a call that found another server at the address
	// than the one that this Store joined. The data of the first one are lost.
	ErrRestarted = errors.New("the server was restarted and its data are lost")
)

// greeting is a server's description of itself.
type greeting struct {
	incarnation uint64 // random, another one each time a server starts
	job         string
}

func (g greeting) encode() []byte {
	return append(binary.LittleEndian.AppendUint64(nil, g.incarnation), g.job...)
}

func parseGreeting(b []byte) (greeting, error) {
	if len(b) < 8 {
		return greeting{}, malformedf("a greeting of %d bytes", len(b))
	}
	return greeting{binary.LittleEndian.Uint64(b), string(b[8:])}, nil
}

// maxShown bounds what is repeated of a job's name.
const maxShown = 200

func shownJob(name string) string {
	if len(name) > maxShown {
		name = name[:maxShown] + "..."
	}
	return fmt.Sprintf("%q", name)
}

// admit returns an error for a client of another job. If either side has no name the client is
// admitted.
func (g greeting) admit(job string) error {
	if g.job == "" || job == "" || g.job == job {
		return nil
	}
	return fmt.Errorf("%w: the store's job is %s, the client's is %s", ErrOtherJob, shownJob(g.job), shownJob(job))
}

// greet is the first request of a native connection. The first one learns the server's
// incarnation, and later ones require the same.
func (d *dialer) greet(c *conn) error {
	req := &request{query: qHello, keys: one(d.job)}
	if _, err := c.Write(appendFrame(nil, 0, req)); err != nil {
		return err
	}
	n, err := readUint32(c.r)
	if err != nil {
		return cut(err)
	}
	id, err := readUint32(c.r)
	if err != nil {
		return cut(err)
	}
	status, err := c.r.ReadByte()
	if err != nil {
		return cut(err)
	}
	if id != 0 || n < frameHead || n > frameHead+8+maxGreeting {
		return malformedf("a reply of %d bytes to request %d instead of a greeting", n, id)
	}
	got, err := readNative(c.r, qHello, 1, status, n-frameHead)
	if err != nil {
		return cut(err)
	}
	if errors.Is(got.err, ErrOtherJob) {
		return permanent{fmt.Errorf("%w; give this job an address of its own (MASTER_PORT)", got.err)}
	} else if got.err != nil {
		return got.err
	}
	g, err := parseGreeting(got.value)
	if err != nil {
		return err
	}
	if d.server != nil && d.server.incarnation != g.incarnation {
		return permanent{fmt.Errorf("%w: incarnation %016x of it answers at %s, and this process joined %016x; start the job again",
			ErrRestarted, g.incarnation, d.addr, d.server.incarnation)}
	}
	if d.server == nil { // else a Clone may be reading it
		d.server = &g
	}
	return nil
}

// maxGreeting bounds the reply to HELLO, and maxJob the name of a job, which it holds.
const (
	maxGreeting = 64 << 10
	maxJob      = maxGreeting - 8
)
