package memfd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/c10d-go/c10d/internal/openfiles"
)

// Server passes a file to other processes of the user, which have to be in its network namespace. They may be in
// another PID namespace, where they could not open the file through /proc.
type Server struct {
	listener *net.UnixListener
	serving  sync.WaitGroup
}

// patience bounds how long a process waits for a file.
const patience = 30 * time.Second

func socket(name string) *net.UnixAddr { return &net.UnixAddr{Net: "unixpacket", Name: "@" + name} }

// Serve passes the file to each process of the user that calls Take with the name, until Close.
func Serve(name string, fd int) (*Server, error) {
	l, err := net.ListenUnix("unixpacket", socket(name))
	if err != nil {
		return nil, fmt.Errorf("passing shared memory: %w", openfiles.Explain(err))
	}
	s := &Server{listener: l}
	s.serving.Go(func() {
		for {
			c, err := l.AcceptUnix()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil {
				time.Sleep(time.Millisecond) // no descriptor is left, most likely
				continue
			}
			if SameUser(c) == nil {
				_, _, _ = c.WriteMsgUnix([]byte{0}, unix.UnixRights(fd), nil) // one message never waits
			}
			c.Close()
		}
	})
	return s, nil
}

// Close ends the service. The file stays open.
func (s *Server) Close() error {
	err := s.listener.Close()
	s.serving.Wait()
	return err
}

// Take returns a file that another process serves.
func Take(name string) (*os.File, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "unixpacket", socket(name).Name)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	c := conn.(*net.UnixConn)
	if err := SameUser(c); err != nil {
		return nil, err
	}
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		return nil, err
	}
	oob := make([]byte, unix.CmsgSpace(4*4))
	_, n, _, _, err := c.ReadMsgUnix(make([]byte, 1), oob)
	fds := Descriptors(oob[:n])
	if err == nil && len(fds) != 1 {
		err = fmt.Errorf("%d descriptors came, want 1", len(fds))
	}
	if err != nil {
		for _, fd := range fds {
			unix.Close(fd)
		}
		return nil, err
	}
	return os.NewFile(uintptr(fds[0]), name), nil
}

// SameUser returns an error if the process at the other end of c runs as another user than this
// one. Both ends come to the same answer.
func SameUser(c *net.UnixConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var peer *unix.Ucred
	var failed error
	err = raw.Control(func(fd uintptr) { peer, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err = errors.Join(err, failed); err != nil {
		return fmt.Errorf("cannot identify the peer's user: %w", err)
	}
	if own := uint32(os.Geteuid()); peer.Uid != own {
		return fmt.Errorf("this process runs as user %d, its peer as user %d", own, peer.Uid)
	}
	return nil
}

// Descriptors returns the descriptors that came with a message.
func Descriptors(oob []byte) (fds []int) {
	msgs, _ := unix.ParseSocketControlMessage(oob)
	for i := range msgs {
		got, _ := unix.ParseUnixRights(&msgs[i])
		fds = append(fds, got...)
	}
	return fds
}
