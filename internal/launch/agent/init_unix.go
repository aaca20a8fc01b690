//go:build unix

package agent

import (
	"os"
	"os/exec"
	"syscall"
)

// RunsInit reports whether this process is process 1, as in a container.
func RunsInit() bool { return os.Getpid() == 1 }

// Init runs a command as process 1 of a container does: it passes signals on, and reaps the processes whose parents have
// ended, which become children of process 1. It returns the command's exit code. The launcher cannot do that itself:
// its ranks would be reaped with the others. This process must have no other children that it waits for.
func Init(command []string, signals <-chan os.Signal) (code int, err error) {
	path, err := exec.LookPath(command[0])
	if err != nil {
		return 0, err
	}
	// A terminal sends its signals to a whole process group: in its own, the command gets each signal once.
	pid, err := syscall.ForkExec(path, command, &syscall.ProcAttr{
		Env: os.Environ(), Files: []uintptr{0, 1, 2}, Sys: &syscall.SysProcAttr{Setpgid: true},
	})
	if err != nil {
		return 0, &os.PathError{Op: "fork/exec", Path: path, Err: err}
	}
	ended := make(chan struct{})
	defer close(ended)
	go func() {
		for {
			select {
			case sig := <-signals:
				if s, ok := sig.(syscall.Signal); ok {
					syscall.Kill(pid, s) // the process returns with the command's end: no other one gets its number
				}
			case <-ended:
				return
			}
		}
	}()
	for {
		var status syscall.WaitStatus
		switch got, err := syscall.Wait4(-1, &status, 0, nil); {
		case err == syscall.EINTR:
		case err != nil:
			return 0, os.NewSyscallError("wait4", err)
		case got != pid || !status.Exited() && !status.Signaled():
		case status.Signaled():
			return signalCode(status.Signal()), nil
		default:
			return status.ExitStatus(), nil
		}
	}
}
