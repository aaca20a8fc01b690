//go:build unix && !linux

package agent

import "os/exec"

// setProcAttr gives a rank its own process group. These systems do not tell a
// child of its parent's end; the guard does.
func setProcAttr(cmd *exec.Cmd) { setGroup(cmd) }

// awaitExit reaps the child as well.
func awaitExit(cmd *exec.Cmd) { cmd.Wait() }

// isStopped would need more than this system's standard library tells.
func isStopped(int) bool { return false }
