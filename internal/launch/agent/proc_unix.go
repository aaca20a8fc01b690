//go:build unix

package agent

import (
	"os"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"
)

func setGroup(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} }

func signalGroup(p *os.Process, sig syscall.Signal) { syscall.Kill(-p.Pid, sig) }

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
