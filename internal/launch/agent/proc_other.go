//go:build !unix

package agent

import (
	"io"
	"os"
	"os/exec"
	"syscall"
)

func setProcAttr(*exec.Cmd) {}

func setGroup(*exec.Cmd) {}

func awaitExit(cmd *exec.Cmd) { cmd.Wait() }

// signalGroup kills the rank: these systems have no other signal to send.
func signalGroup(p *os.Process, _ syscall.Signal) { p.Kill() }

func killGroup(pid int) {
	if p, err := os.FindProcess(pid); err == nil {
		p.Kill()
	}
}

func endedBy(*os.ProcessState) (os.Signal, bool) { return nil, false }

func signalName(sig os.Signal) string { return sig.String() }

// readNow is not called: pipes have no deadlines here.
func readNow(*os.File, []byte) (int, error) { return 0, io.EOF }

// isStopped would need more than this system's standard library tells.
func isStopped(int) bool { return false }
