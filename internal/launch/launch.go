package launch

import (
	"errors"
	"fmt"
	"hash/fnv"
	"net"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
)

// DefaultPort is where rank 0's store is if the launcher tells neither its port nor
// a name for the job. It is torchrun's default.
const DefaultPort = 29500

// Detect makes a port from a job's name by adding 0 to portSpan-1 to lowPort. The
// ports of common services are lower. Linux gives out ports by itself from 32768 up.
const (
	lowPort  = 20000
	portSpan = 10000
)

// portOf returns the port for a job. It is the same on all its ranks. Other jobs most
// likely have another one.
func portOf(id string) int {
	h := fnv.New32a()
	h.Write([]byte(id))
	return lowPort + int(h.Sum32()%portSpan)
}

// ErrNone is matched by the error of a Detect that found no launcher at all.
var ErrNone = errors.New("start the program with a launcher, for example `c10d run -n 2 -- PROGRAM`")

// Env has the information of a launcher about this process.
type Env struct {
	Source string // the launcher, as in the package's table

	Rank, Size int
	LocalRank  int // rank among those of this host; -1 if not told
	LocalSize  int // ranks on this host; 0 if not told
	NodeRank   int // -1 if not told
	Nodes      int // 0 if not told

	Addr string // rank 0's host; empty if it or the port is not known, see Address
	Port int    // 0 exactly if Addr is empty

	// RestartCount tells how often the launcher has restarted the job.
	RestartCount int

	// AgentStore says that the launcher itself hosts the store at Addr and
	// Port, so that rank 0 must not.
	AgentStore bool

	// RunID tells this job from others and is the same on all its ranks; empty if
	// the launcher has no such name. Restarts by the launcher do not change it.
	RunID string

	noAddr *Error
}

// Address returns host and port of the store for Addr and Port. If the launcher
// does not tell them, it returns an *Error that says which variable would.
func (e Env) Address() (string, error) {
	if e.Addr == "" {
		if e.noAddr != nil {
			return "", e.noAddr
		}
		return "", errors.New("launch: the address of rank 0 is not known")
	}
	return net.JoinHostPort(e.Addr, strconv.Itoa(e.Port)), nil
}

// String says in one line what was found and where.
func (e Env) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "rank %d of %d from %s", e.Rank, e.Size, e.Source)
	if e.LocalRank >= 0 {
		fmt.Fprintf(&b, ", local rank %d", e.LocalRank)
		if e.LocalSize > 0 {
			fmt.Fprintf(&b, " of %d", e.LocalSize)
		}
	}
	if e.NodeRank >= 0 {
		fmt.Fprintf(&b, ", node %d", e.NodeRank)
		if e.Nodes > 0 {
			fmt.Fprintf(&b, " of %d", e.Nodes)
		}
	}
	switch addr, err := e.Address(); {
	case err != nil:
		b.WriteString(", no address of rank 0")
	case e.AgentStore:
		b.WriteString(", the launcher's store at " + addr)
	default:
		b.WriteString(", rank 0's store at " + addr)
	}
	if e.RestartCount > 0 {
		fmt.Fprintf(&b, ", restart %d", e.RestartCount)
	}
	return b.String()
}

// Error says what is wrong with a launcher's variables.
type Error struct {
	Launcher string   // empty if there is none
	Missing  []string // variables without which it does not work; "A or B" where either would do
	Found    []string // those of the launcher's that are set, as NAME=value
	Others   []string // further launchers that have set variables
	Err      error    // what is wrong with a value, if something is, or ErrNone
}

func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString("launch: ")
	if e.Launcher != "" {
		b.WriteString(e.Launcher + ": ")
	}
	if len(e.Missing) > 0 {
		plural := ""
		if len(e.Missing) > 1 {
			plural = "s"
		}
		fmt.Fprintf(&b, "environment variable%s %s expected, but not set", plural, strings.Join(e.Missing, " and "))
	}
	if e.Err != nil {
		switch {
		case e.Err == ErrNone:
			b.WriteString(", nor are those of any launcher: ")
		case len(e.Missing) > 0:
			b.WriteString("; ")
		}
		b.WriteString(e.Err.Error())
	}
	if len(e.Found) > 0 {
		b.WriteString("; found " + strings.Join(e.Found, ", "))
	}
	if len(e.Others) > 0 {
		fmt.Fprintf(&b, " (variables of %s are set too, which come after those of %s)", strings.Join(e.Others, " and "), e.Launcher)
	}
	return b.String()
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// launcher is one row of the package's table.
type launcher struct {
	name   string
	claim  []string // one of them set makes it this launcher's process
	all    bool     // all of them must be
	vars   []string // further variables that it reads
	size   []string // the number of processes that it started; none if it starts one on each host
	read   func(*reading) Env
	byHand string // those that people export, and that may be left over
}

// common are the variables that every launcher's ranks may add.
var common = []string{"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}

var launchers = []launcher{
	{
		name:   "torchrun/env",
		claim:  []string{"RANK"},
		vars:   []string{"LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_USE_AGENT_STORE"},
		read:   readEnv,
		byHand: "RANK and WORLD_SIZE",
	},
	{
		name:   "Kubeflow (PET)",
		claim:  []string{"PET_NODE_RANK", "PET_NNODES"},
		vars:   []string{"PET_NPROC_PER_NODE", "LOCAL_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_RDZV_ENDPOINT"},
		read:   readPET,
		byHand: "PET_NODE_RANK and PET_NNODES",
	},
	mpi("Horovod", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
	mpi("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
	mpi("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
	hydra(),
	{
		name:  "Slurm",
		claim: []string{"SLURM_PROCID"},
		vars: []string{"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID",
			"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_ID"},
		size: []string{"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"},
		read: readSlurm,
	},
	mpi("PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
	mpi("PMIx", "PMIX_RANK", "PMI_SIZE", "", ""),
	{
		name:  "LeaderWorkerSet",
		claim: []string{"LWS_WORKER_INDEX"},
		vars:  []string{"LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS"},
		read:  readLWS,
	},
	{
		name:  "JobSet",
		claim: []string{"JOBSET_NAME", "JOB_COMPLETION_INDEX"},
		all:   true,
		vars:  []string{"REPLICATED_JOB_NAME", "REPLICATED_JOB_REPLICAS", "JOB_INDEX", "PROCESSES_IN_JOB", "JOBSET_COORDINATOR"},
		read:  readJobSet,
	},
	{
		name:  "Kubernetes Indexed Job",
		claim: []string{"JOB_COMPLETION_INDEX"},
		read:  readIndexedJob,
	},
}

// Detect reads the variables that getenv, for example os.Getenv, returns. An
// empty one counts as not set, as in PyTorch.
func Detect(getenv func(string) string) (Env, error) {
	var claims []launcher
	for _, l := range launchers {
		if l.claims(getenv) {
			claims = append(claims, l)
		}
	}
	if len(claims) == 0 {
		r := &reading{getenv: getenv}
		if getenv("WORLD_SIZE") == "" {
			r.err = ErrNone
		} else {
			r.launcher = launchers[0]
		}
		r.need("RANK")
		return Env{}, r.failure()
	}
	r := &reading{launcher: claims[0], others: claims[1:], getenv: getenv}
	e := r.launcher.read(r)
	e.Source = r.launcher.name
	r.notStale(e)
	e = r.finish(e)
	if len(r.missing) > 0 || r.err != nil {
		return Env{}, r.failure()
	}
	return e, nil
}

// notStale refuses variables of an earlier job, such as RANK, if mpirun or srun started several processes with
// them. Each process would be the same rank. Variables of torchrun and c10d run are not refused: they come with
// a name of the job.
func (r *reading) notStale(e Env) {
	stale := r.launcher.byHand
	if stale == "" || r.getenv("TORCHELASTIC_RUN_ID") != "" || r.err != nil || len(r.missing) > 0 {
		return
	}
	for _, l := range r.others {
		name, value := r.first(l.size...)
		if name == "" || l.name == "Slurm" && !r.inStep() {
			continue
		}
		if n := r.parse(name, value); n > 1 && n != e.Size {
			r.failf("%s say rank %d of %d, but %s started %d processes (%s): unset %[1]s, "+
				"or set TORCHELASTIC_RUN_ID to a name of the job if a launcher inside %[4]s set them", stale, e.Rank, e.Size, l.name, n, name)
		}
		return
	}
}

func (l launcher) claims(getenv func(string) string) bool {
	for _, v := range l.claim {
		if (getenv(v) != "") != l.all {
			return !l.all
		}
	}
	return l.all
}

// reading reads one launcher's variables and remembers what went wrong.
type reading struct {
	launcher launcher
	others   []launcher
	getenv   func(string) string
	missing  []string
	err      error

	nameless bool // nothing tells the job from another one that the launcher has started on this host
}

// errNameless says why the port of an MPI job is not guessed.
var errNameless = errors.New("the launcher tells no name of the job, and two jobs that meet at one port would be mixed up: set MASTER_PORT to a number that no other job has")

func (r *reading) failf(format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf(format, args...)
	}
}

func (r *reading) failure() *Error {
	e := &Error{Launcher: r.launcher.name, Missing: r.missing, Err: r.err}
	seen := make(map[string]bool)
	for _, list := range [][]string{r.launcher.claim, r.launcher.vars, common} {
		for _, name := range list {
			if v := r.getenv(name); v != "" && !seen[name] {
				seen[name] = true
				e.Found = append(e.Found, name+"="+v)
			}
		}
	}
	for _, o := range r.others {
		// A Job's variables are a JobSet's too, and PMI's are Hydra's.
		if !slices.Contains(r.launcher.claim, o.claim[0]) {
			e.Others = append(e.Others, o.name)
		}
	}
	return e
}

// first returns the first of the variables that is set.
func (r *reading) first(names ...string) (name, value string) {
	for _, n := range names {
		if v := r.getenv(n); n != "" && v != "" {
			return n, v
		}
	}
	return "", ""
}

// need is first for variables one of which must be set.
func (r *reading) need(names ...string) (name, value string) {
	name, value = r.first(names...)
	if name == "" {
		r.missing = append(r.missing, strings.Join(names, " or "))
	}
	return name, value
}

// number returns the first of the variables that is set, or otherwise.
func (r *reading) number(otherwise int, names ...string) int {
	name, value := r.first(names...)
	if name == "" {
		return otherwise
	}
	return r.parse(name, value)
}

// count is number for a variable that must be set.
func (r *reading) count(names ...string) int {
	name, value := r.need(names...)
	if name == "" {
		return 0
	}
	return r.parse(name, value)
}

// parse accepts what a rank, a size or a port may be.
func (r *reading) parse(name, value string) int {
	n, err := strconv.ParseInt(strings.TrimSpace(value), 10, 32)
	if err != nil || n < 0 {
		r.failf("%s=%q is not a number of 0 or more", name, value)
		return 0
	}
	return int(n)
}

// host returns the host that a variable names, "" if it is not set.
func (r *reading) host(name string) string {
	value := r.getenv(name)
	if value == "" {
		return ""
	}
	host, err := Host(name, value)
	if err != nil {
		r.failf("%w", err)
	}
	return host
}

// hostPort is host for a variable that may have a port too.
func (r *reading) hostPort(name string, port int) (string, int) {
	host, text, err := net.SplitHostPort(strings.TrimSpace(r.getenv(name)))
	if err != nil {
		return r.host(name), port
	}
	if host, err = Host(name, host); err != nil {
		r.failf("%w", err)
	}
	if text != "" {
		port = r.parse(name+"'s port", text)
	}
	return host, port
}

// size returns the world size from the launcher's own variables, with which
// WORLD_SIZE must agree, or from WORLD_SIZE.
func (r *reading) size(own ...string) int {
	name, value := r.first(own...)
	if name == "" {
		return r.count(append(own, "WORLD_SIZE")...)
	}
	n := r.parse(name, value)
	r.agree(n, name)
	return n
}

func (r *reading) agree(size int, by string) {
	if world := r.number(size, "WORLD_SIZE"); world != size {
		r.failf("WORLD_SIZE is %d, but %s says %d", world, by, size)
	}
}

// finish adds what does not depend on the launcher, and checks the result.
func (r *reading) finish(e Env) Env {
	if r.getenv("MASTER_ADDR") != "" {
		e.Addr = r.host("MASTER_ADDR")
	}
	if port := r.getenv("MASTER_PORT"); port != "" {
		if e.Port = r.parse("MASTER_PORT", port); e.Port == 0 && e.Size > 1 {
			r.failf("MASTER_PORT=%s: give a port that all ranks know, 1 to 65535", port)
		}
	}
	if e.Port > 65535 {
		r.failf("port %d is above 65535", e.Port)
	}
	if e.LocalSize == e.Size {
		e.Nodes, e.NodeRank = 1, 0
	}
	switch {
	case len(r.missing) > 0 || r.err != nil:
	case e.Size < 1 || e.Rank >= e.Size:
		r.failf("rank %d is not within a world of %d", e.Rank, e.Size)
	case e.LocalSize > e.Size || e.LocalSize > 0 && e.LocalRank >= e.LocalSize:
		r.failf("local rank %d of %d does not fit a world of %d", e.LocalRank, e.LocalSize, e.Size)
	case e.Nodes > e.Size || e.Nodes > 0 && e.NodeRank >= e.Nodes:
		r.failf("node %d of %d does not fit a world of %d", e.NodeRank, e.Nodes, e.Size)
	}
	if e.Addr == "" {
		e.noAddr = r.failure()
		e.noAddr.Missing = []string{"MASTER_ADDR"}
	}
	switch {
	case e.Port != 0:
	case r.launcher.claim[0] == "RANK":
		if e.noAddr != nil {
			e.noAddr.Missing = append(e.noAddr.Missing, "MASTER_PORT")
		}
	case r.nameless && e.Size > 1:
		if e.noAddr == nil {
			e.noAddr = r.failure()
		}
		e.noAddr.Missing = append(e.noAddr.Missing, "MASTER_PORT")
		e.noAddr.Err = errNameless
	}
	switch {
	case e.noAddr != nil:
		e.Addr, e.Port = "", 0
	case e.Port == 0:
		e.Port = DefaultPort
	}
	return e
}

func readEnv(r *reading) Env {
	e := Env{
		Rank:         r.count("RANK"),
		Size:         r.count("WORLD_SIZE"),
		LocalRank:    r.number(-1, "LOCAL_RANK"),
		LocalSize:    r.number(0, "LOCAL_WORLD_SIZE"),
		NodeRank:     r.number(-1, "GROUP_RANK"),
		Nodes:        r.number(0, "GROUP_WORLD_SIZE"),
		RestartCount: r.number(0, "TORCHELASTIC_RESTART_COUNT"),
		RunID:        r.torchrunID("TORCHELASTIC_RUN_ID"),
		AgentStore:   r.getenv("TORCHELASTIC_USE_AGENT_STORE") == "True",
	}
	// With only one of the two, the other was forgotten. Without both, the ranks may meet
	// elsewhere.
	addr, port := r.getenv("MASTER_ADDR"), r.getenv("MASTER_PORT")
	if (addr == "") != (port == "") {
		r.need("MASTER_ADDR")
		r.need("MASTER_PORT")
	}
	return e
}

// torchrunID returns the --rdzv_id of a torchrun. Its default, "none", is no name.
func (r *reading) torchrunID(name string) string {
	if id := r.getenv(name); id != "none" {
		return id
	}
	return ""
}

func readPET(r *reading) Env {
	_, nodes := r.need("PET_NNODES")
	e := Env{LocalSize: 1, LocalRank: r.number(-1, "LOCAL_RANK")}
	if low, high, elastic := strings.Cut(nodes, ":"); elastic && low != high {
		r.failf("PET_NNODES=%q is a range: only torchrun knows how many nodes came", nodes)
	} else if nodes != "" {
		e.Nodes = r.parse("PET_NNODES", low)
	}
	if e.Nodes > 1 {
		e.NodeRank = r.count("PET_NODE_RANK")
	} else {
		e.NodeRank = r.number(0, "PET_NODE_RANK")
	}
	switch per := r.getenv("PET_NPROC_PER_NODE"); per {
	case "":
	case "cpu":
		e.LocalSize = runtime.NumCPU()
	case "auto", "gpu":
		r.failf("PET_NPROC_PER_NODE=%q: set a number, or start the ranks with a launcher", per)
	default:
		e.LocalSize = r.parse("PET_NPROC_PER_NODE", per)
	}
	if e.LocalRank < 0 {
		e.LocalRank = 0
		if e.LocalSize > 1 {
			r.need("LOCAL_RANK")
		}
	}
	if e.Nodes > 0 && e.NodeRank >= e.Nodes {
		r.failf("PET_NODE_RANK is %d, but PET_NNODES %d", e.NodeRank, e.Nodes)
	}
	size := int64(e.Nodes) * int64(e.LocalSize)
	if size != int64(int32(size)) {
		r.failf("%d nodes of %d ranks are too many", e.Nodes, e.LocalSize)
		return e
	}
	e.Rank, e.Size = e.NodeRank*e.LocalSize+e.LocalRank, int(size)
	// PyTorchJob's WORLD_SIZE counts pods.
	if world := r.number(e.Size, "WORLD_SIZE"); world != e.Size && world != e.Nodes {
		r.agree(e.Size, "PET_NNODES times PET_NPROC_PER_NODE")
	}
	e.Addr, e.Port = r.host("PET_MASTER_ADDR"), r.number(0, "PET_MASTER_PORT")
	if endpoint := r.getenv("PET_RDZV_ENDPOINT"); e.Addr == "" && endpoint != "" {
		e.Addr, e.Port = r.hostPort("PET_RDZV_ENDPOINT", e.Port)
	}
	e.RunID = r.torchrunID("PET_RDZV_ID")
	return e
}

// mpi is a launcher of the mpirun kind, which tells ranks and sizes and not
// where rank 0 is.
func mpi(name, rank, size, localRank, localSize string) launcher {
	l := launcher{name: name, claim: []string{rank}, vars: []string{size}, size: []string{size}}
	if localRank != "" {
		l.vars = append(l.vars, localRank, localSize)
	}
	l.read = func(r *reading) Env {
		e := Env{
			Rank:      r.count(rank),
			Size:      r.size(size),
			LocalRank: r.number(-1, localRank),
			LocalSize: r.number(0, localSize),
			NodeRank:  -1,
		}
		e.Addr = r.mpiHost(e)
		if id := r.mpiJob(e); id != "" {
			e.RunID, e.Port = id, portOf(id)
		} else {
			e.RunID, r.nameless = r.getenv("SLURM_JOB_ID"), true
		}
		return e
	}
	return l
}

// mpiJob returns the name that an mpirun gives its job, or "". It reads variables that the launcher sets for every
// rank. Those of a batch system may be missing on other hosts than mpirun's, and all jobs in one allocation have the
// same. Hydra and mpispawn set none: their jobs are told apart by the launcher's processes.
func (r *reading) mpiJob(e Env) string {
	if r.launcher.name == "Horovod" {
		host, port := r.getenv("HOROVOD_GLOO_RENDEZVOUS_ADDR"), r.getenv("HOROVOD_GLOO_RENDEZVOUS_PORT")
		if host != "" && port != "" {
			return net.JoinHostPort(host, port)
		}
	}
	_, id := r.first("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID")
	// Open MPI 4 makes its number from 16 bits of a hash, which repeat. This key is
	// random, and also the same for all ranks.
	if key := r.getenv("OMPI_MCA_orte_precondition_transports"); id != "" && key != "" {
		id += "/" + key
	}
	if id == "" {
		id = starterOf("/proc", os.Getppid()).job(e.LocalSize == e.Size)
	}
	return id
}

// hydra distinguishes the mpirun of MPICH and Intel MPI from srun, which sets PMI_RANK too.
func hydra() launcher {
	l := mpi("Hydra (MPICH, Intel MPI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
	l.claim, l.all = []string{"PMI_RANK", "MPI_LOCALRANKID"}, true
	return l
}

// mpiHost looks for rank 0's host in the variables of batch systems and in hostfiles.
func (r *reading) mpiHost(e Env) string {
	if e.LocalSize == e.Size && e.Size > 0 {
		return "127.0.0.1"
	}
	if nodes := r.getenv("SLURM_JOB_NODELIST"); nodes != "" {
		// Not the step's list: mpirun starts its daemons as a step without its own host, where
		// ranks have the job's variables.
		return r.slurmHost("SLURM_JOB_NODELIST")
	}
	_, path := r.first("OMPI_MCA_orte_default_hostfile", "I_MPI_HYDRA_HOST_FILE", "HYDRA_HOST_FILE")
	if path == "" {
		return ""
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return "" // the MPI Operator mounts it in the launcher's pod, not in every worker's
	}
	for line := range strings.Lines(string(text)) {
		line, _, _ = strings.Cut(line, "#")
		if f := strings.Fields(line); len(f) > 0 {
			host, _, _ := strings.Cut(f[0], ":") // "host slots=2" or "host:2"
			return host
		}
	}
	return ""
}

func readLWS(r *reading) Env {
	return Env{
		Rank: r.count("LWS_WORKER_INDEX"), Size: r.size("LWS_GROUP_SIZE"),
		LocalRank: 0, LocalSize: 1,
		NodeRank: r.number(0, "LWS_WORKER_INDEX"), Nodes: r.number(0, "LWS_GROUP_SIZE", "WORLD_SIZE"),
		Addr: r.host("LWS_LEADER_ADDRESS"),
	}
}

func readJobSet(r *reading) Env {
	name := r.getenv("JOBSET_NAME")
	e := Env{LocalSize: 1, RunID: r.getenv("JOBSET_UID"), RestartCount: r.number(0, "JOBSET_RESTART_ATTEMPT")}
	index := r.count("JOB_COMPLETION_INDEX")
	jobs := r.number(1, "REPLICATED_JOB_REPLICAS")
	job := r.number(0, "JOB_INDEX")
	variable, value := r.first("PROCESSES_IN_JOB")
	switch {
	case variable != "":
		pods := r.parse(variable, value)
		size := int64(jobs) * int64(pods)
		if index >= pods || job >= jobs || size != int64(int32(size)) {
			r.failf("pod %d of %d in job %d of %d", index, pods, job, jobs)
			return e
		}
		e.Rank, e.Size = job*pods+index, int(size)
		r.agree(e.Size, "REPLICATED_JOB_REPLICAS times PROCESSES_IN_JOB")
	case jobs > 1 || job > 0:
		r.need("PROCESSES_IN_JOB")
	default:
		e.Rank, e.Size = index, r.count("PROCESSES_IN_JOB", "WORLD_SIZE")
	}
	e.NodeRank, e.Nodes = e.Rank, e.Size
	e.Addr, e.Port = r.hostPort("JOBSET_COORDINATOR", 0)
	if replicated := r.getenv("REPLICATED_JOB_NAME"); e.Addr == "" && replicated != "" {
		// The pods' names and the default subdomain, as JobSet makes them.
		e.Addr = fmt.Sprintf("%s-%s-0-0.%[1]s", name, replicated)
	}
	return e
}

func readIndexedJob(r *reading) Env {
	e := Env{Rank: r.count("JOB_COMPLETION_INDEX"), Size: r.count("WORLD_SIZE"), LocalSize: 1, RunID: r.getenv("JOB_UID")}
	e.NodeRank, e.Nodes = e.Rank, e.Size
	return e
}
