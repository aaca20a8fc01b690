package agent

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// guard is a process that kills the ranks after the agent's end. Lines of its standard
// input add a process group ("+123"), remove one ("-123"), or name a directory of the agent
// ("=/path"). When the input ends, it kills the groups and removes the directories. A nil
// guard does nothing.
type guard struct {
	cmd *exec.Cmd
	in  *os.File
}

// Guard is the body of the guard process, for a program that names itself in
// Job.Guard. It returns when in has ended.
func Guard(in io.Reader) {
	signal.Ignore(os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	outlive(in)
}

func outlive(in io.Reader) {
	groups := make(map[int]bool)
	var scratch []string
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		text := lines.Text()
		if len(text) < 2 {
			continue
		}
		if text[0] == '=' && strings.HasPrefix(filepath.Base(text[1:]), scratchName) {
			scratch = append(scratch, text[1:])
			continue
		}
		pid, err := strconv.Atoi(text[1:])
		if err != nil || pid <= 1 {
			continue
		}
		if text[0] == '+' {
			groups[pid] = true
		} else {
			delete(groups, pid)
		}
	}
	for pid := range groups {
		killGroup(pid)
	}
	for _, dir := range scratch {
		// The ranks may still be dying, and write.
		for deadline := time.Now().Add(killWait); os.RemoveAll(dir) != nil && time.Now().Before(deadline); {
			time.Sleep(10 * time.Millisecond)
		}
	}
}

func startGuard(command []string) (*guard, error) {
	if len(command) == 0 {
		return nil, nil
	}
	theirs, ours, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	g := &guard{cmd: exec.Command(command[0], command[1:]...), in: ours}
	g.cmd.Stdin = theirs
	setGroup(g.cmd)
	if err := g.cmd.Start(); err != nil {
		ours.Close()
		return nil, fmt.Errorf("the guard: %w", err)
	}
	return g, nil
}

func (g *guard) watch(pid int) {
	if g != nil {
		fmt.Fprintf(g.in, "+%d\n", pid)
	}
}

func (g *guard) forget(pid int) {
	if g != nil {
		fmt.Fprintf(g.in, "-%d\n", pid)
	}
}

// remove has the directory removed if the agent is killed.
func (g *guard) remove(dir string) {
	if g == nil {
		return
	}
	if abs, err := filepath.Abs(dir); err == nil {
		fmt.Fprintf(g.in, "=%s\n", abs)
	}
}

// close ends the guard when there is nothing left to guard.
func (g *guard) close() {
	if g != nil {
		g.cmd.Process.Kill()
		g.cmd.Wait()
		g.in.Close()
	}
}
