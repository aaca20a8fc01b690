package launch

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// starter is the process that an MPI launcher runs on each host to start the ranks there.
type starter struct {
	pid     string // empty if there is none
	began   string // when, in ticks since the host was booted
	control string // "host:port" at which it was told to find mpiexec; empty if unknown
}

// starters are the names of such processes whose ranks get no variable with the job's name: hydra's
// (MPICH, Intel MPI, MVAPICH) and that of MVAPICH's mpirun_rsh.
var starters = map[string]bool{"hydra_pmi_proxy": true, "mpispawn": true}

// starterOf returns the nearest starter among pid and its ancestors, as the process file system
// at root shows them. There is none on other systems than Linux.
//
// It does not ask the starter for the job's name over the descriptor in PMI_FD, where the answer to
// "cmd=get_my_kvsname" has it. From the first word on, hydra takes the process for an MPI program:
// if that ends without "cmd=finalize", hydra kills all other ranks without a message, and
// mpiexec returns 0. After "cmd=finalize" nobody can ask again, neither MPI_Init nor a second
// program of the same script. Also a script may have closed the descriptor, and its number may
// belong to another file.
func starterOf(root string, pid int) starter {
	for range 64 {
		// "PID (NAME) STATE PPID ... STARTTIME ...", where NAME may have blanks and brackets.
		text, err := os.ReadFile(filepath.Join(root, strconv.Itoa(pid), "stat"))
		_, after, ok := strings.Cut(string(text), " (")
		end := strings.LastIndex(after, ") ")
		if err != nil || !ok || end < 0 {
			return starter{}
		}
		fields := strings.Fields(after[end+2:])
		const parent, start = 1, 19
		if len(fields) <= start {
			return starter{}
		}
		if starters[after[:end]] {
			s := starter{pid: strconv.Itoa(pid), began: fields[start]}
			args, _ := os.ReadFile(filepath.Join(root, s.pid, "cmdline"))
			if _, control, ok := strings.Cut(string(args), "\x00--control-port\x00"); ok {
				s.control, _, _ = strings.Cut(control, "\x00")
			}
			return s
		}
		if pid, err = strconv.Atoi(fields[parent]); err != nil || pid == 0 {
			return starter{}
		}
	}
	return starter{}
}

// job returns a name for the starter's job that is the same on all its ranks, or "". Each host has
// a starter of its own. If the ranks are on several, only mpiexec's address is the same.
func (s starter) job(oneHost bool) string {
	switch {
	case s.pid == "":
		return ""
	case oneHost:
		host, _ := os.Hostname()
		return host + "/" + s.pid + "." + s.began
	}
	return s.control
}
