package agent

import (
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"
)

// setProcAttr gives a rank its own process group, and SIGKILL when the thread
// that starts it ends.
func setProcAttr(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

// awaitExit returns when a child has ended, before it is reaped: until then its
// process group's number cannot be given to another.
func awaitExit(cmd *exec.Cmd) {
	for unix.Waitid(unix.P_PID, cmd.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil) == unix.EINTR {
	}
}
