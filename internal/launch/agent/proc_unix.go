//go:build unix

package agent

import (
	"io"
	"os"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"
)

func setGroup(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} }

// signalGroup sends sig, and has stopped processes go on so that they take it.
func signalGroup(p *os.Process, sig syscall.Signal) {
	syscall.Kill(-p.Pid, sig)
	if sig != syscall.SIGKILL {
		syscall.Kill(-p.Pid, syscall.SIGCONT)
	}
}

func killGroup(pid int) { syscall.Kill(-pid, syscall.SIGKILL) }

// endedBy returns the signal that ended a process, if one did.
func endedBy(s *os.ProcessState) (os.Signal, bool) {
	w, ok := s.Sys().(syscall.WaitStatus)
	return w.Signal(), ok && w.Signaled()
}

func signalName(sig os.Signal) string {
	if s, ok := sig.(syscall.Signal); ok {
		if name := unix.SignalName(s); name != "" {
			return name
		}
	}
	return sig.String()
}

// readNow reads what a pipe holds, and does not wait for more.
func readNow(f *os.File, b []byte) (n int, err error) {
	c, err := f.SyscallConn()
	if err != nil {
		return 0, err
	}
	if err := c.Control(func(fd uintptr) { n, _ = syscall.Read(int(fd), b) }); err != nil {
		return 0, err
	}
	if n <= 0 {
		return 0, io.EOF
	}
	return n, nil
}
