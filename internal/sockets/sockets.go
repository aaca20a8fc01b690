// Package sockets lists the TCP sockets of a process, for tests that check where
// it listens and what it is connected with. It reads /proc, so it is for Linux.
package sockets

import (
	"bufio"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Socket is a TCP socket of the process.
type Socket struct {
	Local, Remote netip.AddrPort
	Listens       bool
}

func (s Socket) String() string {
	if s.Listens {
		return "listens on " + s.Local.String()
	}
	return fmt.Sprintf("%v connected with %v", s.Local, s.Remote)
}

// IsLoopback reports whether only this host reaches the socket.
func (s Socket) IsLoopback() bool { return s.Local.Addr().Unmap().IsLoopback() }

// Of returns the TCP sockets that the process pid has open. It needs the rights of
// the process's owner.
func Of(pid int) ([]Socket, error) {
	dir := filepath.Join("/proc", strconv.Itoa(pid))
	fds, err := os.ReadDir(filepath.Join(dir, "fd"))
	if err != nil {
		return nil, err
	}
	open := make(map[string]bool)
	for _, fd := range fds {
		target, err := os.Readlink(filepath.Join(dir, "fd", fd.Name()))
		if err != nil {
			continue // closed meanwhile
		}
		if inode, ok := strings.CutPrefix(target, "socket:["); ok {
			open[strings.TrimSuffix(inode, "]")] = true
		}
	}
	var all []Socket
	for _, table := range []string{"tcp", "tcp6"} {
		found, err := read(filepath.Join(dir, "net", table), open)
		if err != nil {
			return nil, err
		}
		all = append(all, found...)
	}
	return all, nil
}

// read returns the sockets of a kernel's table whose inodes are in open.
func read(table string, open map[string]bool) ([]Socket, error) {
	const listen = "0A" // TCP_LISTEN
	f, err := os.Open(table)
	if os.IsNotExist(err) {
		return nil, nil // no IPv6
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var all []Socket
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		c := strings.Fields(lines.Text())
		if len(c) < 10 || !open[c[9]] {
			continue
		}
		s := Socket{Listens: c[3] == listen}
		for i, at := range []*netip.AddrPort{&s.Local, &s.Remote} {
			if *at, err = parse(c[1+i]); err != nil {
				return nil, fmt.Errorf("%s: %w", table, err)
			}
		}
		all = append(all, s)
	}
	return all, lines.Err()
}

// parse reads an address as the kernel prints it: hexadecimal words of 32 bits in
// the host's order, a colon and the port.
func parse(s string) (netip.AddrPort, error) {
	words, port, _ := strings.Cut(s, ":")
	b, err := hex.DecodeString(words)
	if err != nil {
		return netip.AddrPort{}, err
	}
	for i := 0; i+4 <= len(b); i += 4 {
		binary.NativeEndian.PutUint32(b[i:], binary.BigEndian.Uint32(b[i:]))
	}
	addr, ok := netip.AddrFromSlice(b)
	n, err := strconv.ParseUint(port, 16, 16)
	if !ok || err != nil {
		return netip.AddrPort{}, fmt.Errorf("%q is no address", s)
	}
	return netip.AddrPortFrom(addr, uint16(n)), nil
}
