package mesh

import (
	"fmt"
	"net"
	"syscall"
	"time"

	"github.com/c10d-go/c10d/internal/tcpsock"
)

// DefaultSilence is how long another host may acknowledge nothing before its connections end. It
// is several times what a switch takes to find another way, and what a busy virtual machine may
// stand still.
const DefaultSilence = 15 * time.Second

// longestPause is the longest pause before a question that Linux takes.
const longestPause = 32767 * time.Second

// traffic is what the system tells of connections; nothing where it does not tell.
type traffic struct {
	acked uint64        // bytes that the other host has acknowledged
	quiet time.Duration // for how long nothing has come
	least time.Duration // that a packet and its acknowledgement took
}

// trafficOf returns the traffic of a connection.
func trafficOf(c net.Conn) traffic {
	if s, ok := below(c).(syscall.Conn); ok {
		return socketTraffic(s)
	}
	return traffic{}
}

// below returns the connection that carries c.
func below(c net.Conn) net.Conn {
	for {
		over, ok := c.(interface{ NetConn() net.Conn }) // TLS, and what counts below it
		if !ok {
			return c
		}
		c = over.NetConn()
	}
}

// EndOf returns why a connection has ended: err, or that time ran out. Linux reports that to one
// call only, for example a write. Reads then return EOF.
func EndOf(conn net.Conn, err error) error {
	if s, ok := below(conn).(syscall.Conn); ok && !InSilence(err) && timedOut(s) {
		return syscall.ETIMEDOUT
	}
	return err
}

// LimitSilence makes a connection end once the other host has acknowledged nothing for d. This holds
// with and without data on their way. 0 means DefaultSilence, negative means never. A host is asked after
// 2/5 of d without data, and then every fifth. Systems other than Linux notice lost data later.
// Connections that are not TCP stay as they are.
//
// On a connection within the host nobody is asked: the connection ends with the process at its
// other end. 256 ranks on two CPUs have 65000 ends of connections. Linux loses packets of the
// loopback interface when more than 1000 wait for a CPU, and three lost questions ended
// connections of live ranks.
func LimitSilence(conn net.Conn, d time.Duration) error {
	if d == 0 {
		d = DefaultSilence
	}
	c, ok := conn.(interface {
		SetKeepAliveConfig(net.KeepAliveConfig) error
		syscall.Conn
	})
	if d < 0 || !ok {
		return nil
	}
	fifth := min(d/5, longestPause/2)
	if err := c.SetKeepAliveConfig(net.KeepAliveConfig{Enable: !tcpsock.IsLocal(conn), Idle: 2 * fifth, Interval: fifth, Count: 3}); err != nil {
		return fmt.Errorf("keep-alive: %w", err)
	}
	if err := setUserTimeout(c, d); err != nil {
		return fmt.Errorf("TCP_USER_TIMEOUT: %w", err)
	}
	return nil
}
