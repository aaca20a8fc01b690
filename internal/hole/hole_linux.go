package hole

import (
	"context"
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/c10d-go/c10d/internal/freeport"
)

// Name is a name that this process can look up during a test.
const Name = "two.example"

// Open returns a port at which 127.0.0.2 drops packets and nobody listens on 127.0.0.1. Both are addresses
// of Name, first the one that drops if first is set. It replaces net.DefaultResolver until the test ends.
func Open(t testing.TB, first bool) (port string) {
	t.Helper()
	drops := netip.MustParseAddr("127.0.0.2")
	addrs := []netip.Addr{netip.MustParseAddr("127.0.0.1"), drops}
	if first {
		addrs[0], addrs[1] = addrs[1], addrs[0]
	}
	before := net.DefaultResolver
	net.DefaultResolver = &net.Resolver{PreferGo: true, Dial: func(context.Context, string, string) (net.Conn, error) {
		client, server := net.Pipe()
		go answer(server, addrs)
		return client, nil
	}}
	t.Cleanup(func() { net.DefaultResolver = before })

	// A listener that accepts nothing drops the packets of those who come after its queue is full.
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Close(fd) })
	// A port that the kernel finds free for one address may be in use on the other.
	at := netip.AddrPortFrom(drops, netip.MustParseAddrPort(freeport.Loopback(t)).Port())
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Addr: drops.As4(), Port: int(at.Port())}); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	for {
		c, err := net.DialTimeout("tcp", at.String(), time.Second)
		if err != nil {
			break
		}
		t.Cleanup(func() { c.Close() })
	}
	_, port, _ = net.SplitHostPort(at.String())
	return port
}

// answer is a name server over TCP for Name, which has no version 6 addresses.
func answer(c net.Conn, addrs []netip.Addr) {
	defer c.Close()
	head := make([]byte, 2)
	for {
		if _, err := io.ReadFull(c, head); err != nil {
			return
		}
		query := make([]byte, binary.BigEndian.Uint16(head))
		if _, err := io.ReadFull(c, query); err != nil || len(query) < 12 {
			return
		}
		end := 12 // of the question's name
		var labels []string
		for end < len(query) && query[end] != 0 {
			next := end + 1 + int(query[end])
			if next >= len(query) {
				return
			}
			labels = append(labels, string(query[end+1:next]))
			end = next
		}
		if end+5 > len(query) {
			return
		}
		known := strings.EqualFold(strings.Join(labels, "."), Name)
		reply := append([]byte{}, query[:end+5]...)
		copy(reply[2:], []byte{0x81, 0x80, 0, 1, 0, 0, 0, 0, 0, 0}) // a response with one question
		switch kind := binary.BigEndian.Uint16(query[end+1:]); {
		case !known:
			reply[3] |= 3 // no such name
		case kind == 1: // A
			reply[7] = byte(len(addrs))
			for _, a := range addrs {
				reply = append(reply, 0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4)
				reply = append(reply, a.AsSlice()...)
			}
		}
		if _, err := c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(reply))), reply...)); err != nil {
			return
		}
	}
}
