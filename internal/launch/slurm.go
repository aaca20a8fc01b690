package launch

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

func readSlurm(r *reading) Env {
	e := Env{
		Rank:         r.count("SLURM_PROCID"),
		Size:         r.size("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
		LocalRank:    r.number(-1, "SLURM_LOCALID"),
		NodeRank:     r.number(-1, "SLURM_NODEID"),
		Nodes:        r.number(0, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
		RestartCount: r.number(0, "SLURM_RESTART_COUNT"),
		RunID:        r.slurmID(),
	}
	e.LocalSize = r.slurmLocalSize(e)
	if e.Size != 1 && !r.inStep() { // 0 if sbatch was told no number of tasks
		r.failf("srun has not started this process (SLURM_STEP_ID): a batch script starts the program with `srun PROGRAM`")
	}
	e.Addr = r.slurmHost("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
	if e.Addr != "" && (e.Nodes == 1 || e.LocalSize == e.Size) && !r.heterogeneous() {
		e.Addr = "127.0.0.1"
	}
	e.Port = r.slurmPort()
	return e
}

// inStep reports whether srun started this process. sbatch runs the script with SLURM_PROCID=0,
// and with no number of a step or one of the special steps'.
func (r *reading) inStep() bool {
	_, err := strconv.ParseInt(r.getenv("SLURM_STEP_ID"), 10, 32)
	return err == nil
}

// heterogeneous reports whether the job has parts, each with numbers of its own.
func (r *reading) heterogeneous() bool {
	_, parts := r.first("SLURM_HET_SIZE", "SLURM_PACK_SIZE")
	return parts != ""
}

// slurmID returns the name of the step. A heterogeneous job has none: its parts have
// numbers of their own, and may be one group.
func (r *reading) slurmID() string {
	_, id := r.first("SLURM_JOB_ID", "SLURM_JOBID")
	if r.heterogeneous() {
		return ""
	}
	if step := r.getenv("SLURM_STEP_ID"); id != "" && step != "" {
		id += "." + step
	}
	return id
}

// slurmLocalSize returns the number of tasks of this node. The variables may be those of the
// whole job while the step is smaller: then their sum is not the size.
func (r *reading) slurmLocalSize(e Env) int {
	for _, name := range []string{"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"} {
		value := r.getenv(name)
		if value == "" {
			continue
		}
		tasks, err := ParseTasks(value)
		if err != nil {
			r.failf("%s: %w", name, err)
			return 0
		}
		total := 0
		for _, n := range tasks {
			total += n
		}
		if total == e.Size && e.NodeRank >= 0 && e.NodeRank < len(tasks) {
			return tasks[e.NodeRank]
		}
	}
	if n := r.number(0, "SLURM_NTASKS_PER_NODE"); n*e.Nodes == e.Size {
		return n
	}
	return 0
}

// slurmHost returns the first host of the first list that is set: Slurm places
// task 0 there.
func (r *reading) slurmHost(names ...string) string {
	name, list := r.first(names...)
	if name == "" {
		return ""
	}
	hosts, err := ParseNodes(list)
	if err != nil {
		r.failf("%s: %w", name, err)
		return ""
	}
	return hosts[0]
}

// slurmPort returns a port that every rank computes alike. It is the first port that Slurm
// reserved for the step (srun --resv-ports). Without one it is made from the numbers of the job
// and the step.
func (r *reading) slurmPort() int {
	if ports := r.getenv("SLURM_STEP_RESV_PORTS"); ports != "" {
		first, _, _ := strings.Cut(ports, ",")
		first, _, _ = strings.Cut(first, "-")
		return r.parse("SLURM_STEP_RESV_PORTS", first)
	}
	// Jobs on one node often have consecutive numbers. The factor 101 also gives their
	// first steps different ports.
	id := r.number(0, "SLURM_JOB_ID", "SLURM_JOBID")%portSpan + 101*(r.slurmStep()%portSpan)
	return lowPort + id%portSpan
}

// slurmStep returns the number of the step. Slurm's special steps (batch, extern) have
// numbers above 2^31-1, for which it returns 0.
func (r *reading) slurmStep() int {
	n, err := strconv.ParseInt(r.getenv("SLURM_STEP_ID"), 10, 32)
	if err != nil || n < 0 {
		return 0
	}
	return int(n)
}

// maxNodes limits the entries to which a list may expand. It is four times the nodes of the
// largest machine so far.
const maxNodes = 1 << 16

// maxName is the longest name with its brackets. A host name has at most 253
// bytes; a large machine's list of racks and nodes has a few hundred.
const maxName = 4096

// ErrNodeList is matched by the errors of ParseNodes and ParseTasks.
var ErrNodeList = errors.New("not a Slurm list")

func badList(list, format string, args ...any) error {
	const shown = 80
	if len(list) > shown {
		list = list[:shown] + "..."
	}
	return fmt.Errorf("%w: %q: %s", ErrNodeList, list, fmt.Sprintf(format, args...))
}

// ParseNodes expands a Slurm node list such as "n[01-03,7],m5" into its hosts
// in order: n01, n02, n03, n7, m5. Brackets may come anywhere and several times
// in a name. A list of more than 65536 hosts is an error.
func ParseNodes(list string) ([]string, error) {
	var hosts []string
	for rest := list; ; {
		name, after, more := cutOutside(rest)
		expanded, err := expand(list, name, maxNodes-len(hosts))
		if err != nil {
			return nil, err
		}
		hosts = append(hosts, expanded...)
		if !more {
			return hosts, nil
		}
		rest = after
	}
}

// cutOutside cuts at the first comma outside of brackets.
func cutOutside(s string) (before, after string, found bool) {
	inside := false
	for i := range len(s) {
		switch s[i] {
		case '[':
			inside = true
		case ']':
			inside = false
		case ',':
			if !inside {
				return s[:i], s[i+1:], true
			}
		}
	}
	return s, "", false
}

// expand expands one name into at most limit hosts.
func expand(list, name string, limit int) ([]string, error) {
	if len(name) > maxName {
		return nil, badList(list, "a name of %d bytes", len(name))
	}
	hosts := []string{""}
	for rest := name; rest != ""; {
		plain, bracket, open := strings.Cut(rest, "[")
		numbers := []string{""}
		rest = ""
		if open {
			inner, after, closed := strings.Cut(bracket, "]")
			if !closed {
				return nil, badList(list, "a bracket is not closed")
			}
			var err error
			if numbers, err = expandRanges(list, inner, limit/len(hosts)); err != nil {
				return nil, err
			}
			rest = after
		}
		if strings.ContainsAny(plain, "] \t\n") {
			return nil, badList(list, "%q is no part of a host name", plain)
		}
		next := make([]string, 0, len(hosts)*len(numbers))
		for _, h := range hosts {
			for _, n := range numbers {
				next = append(next, h+plain+n)
			}
		}
		hosts = next
	}
	if hosts[0] == "" {
		return nil, badList(list, "a name is empty")
	}
	if len(hosts) > limit {
		return nil, badList(list, "more than %d hosts", maxNodes)
	}
	return hosts, nil
}

// expandRanges expands the inside of a bracket, "01-03,7", into at most limit
// numbers. Leading zeros of a range's lower end set the width.
func expandRanges(list, inner string, limit int) ([]string, error) {
	var numbers []string
	for part := range strings.SplitSeq(inner, ",") {
		low, high, ok := strings.Cut(part, "-")
		if !ok {
			high = low
		}
		from, err1 := strconv.ParseUint(low, 10, 32)
		to, err2 := strconv.ParseUint(high, 10, 32)
		if err1 != nil || err2 != nil || from > to || len(low) > 32 {
			return nil, badList(list, "%q is no number or range", part)
		}
		if to-from >= uint64(max(limit-len(numbers), 0)) {
			return nil, badList(list, "more than %d hosts", maxNodes)
		}
		for n := from; n <= to; n++ {
			numbers = append(numbers, fmt.Sprintf("%0*d", len(low), n))
		}
	}
	return numbers, nil
}

// ParseTasks expands SLURM_TASKS_PER_NODE, such as "4(x2),3", into the number
// of tasks of each node: 4, 4, 3.
func ParseTasks(list string) ([]int, error) {
	var tasks []int
	for part := range strings.SplitSeq(list, ",") {
		count, repeat, ok := strings.Cut(part, "(x")
		times := uint64(1)
		var err error
		if ok {
			inner, closed := strings.CutSuffix(repeat, ")")
			if times, err = strconv.ParseUint(inner, 10, 32); err != nil || !closed || times == 0 {
				return nil, badList(list, "%q has no good repeat count", part)
			}
		}
		n, err := strconv.ParseUint(count, 10, 31)
		if err != nil {
			return nil, badList(list, "%q is no number of tasks", part)
		}
		if times > uint64(maxNodes-len(tasks)) {
			return nil, badList(list, "more than %d nodes", maxNodes)
		}
		for range times {
			tasks = append(tasks, int(n))
		}
	}
	return tasks, nil
}
