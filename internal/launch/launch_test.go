package launch

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
)

// environ turns "A=1 B=2" into a getenv.
func environ(vars string) func(string) string {
	m := make(map[string]string)
	for _, kv := range strings.Fields(vars) {
		k, v, _ := strings.Cut(kv, "=")
		m[k] = v
	}
	return func(k string) string { return m[k] }
}

func TestDetect(t *testing.T) {
	hostfile := filepath.Join(t.TempDir(), "hostfile")
	require.NoError(t, os.WriteFile(hostfile, []byte("# the job's\n\njob-worker-0.job slots=2\njob-worker-1.job slots=2\n"), 0o600))

	for _, c := range []struct{ name, vars, want string }{
		{
			"torchrun",
			"RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 GROUP_WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 " +
				"TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_RESTART_COUNT=2 TORCHELASTIC_RUN_ID=none",
			"rank 5 of 8 from torchrun/env, local rank 1 of 4, node 1 of 2, the launcher's store at 10.0.0.1:29500, restart 2",
		},
		{"four variables", "RANK=1 WORLD_SIZE=2 MASTER_ADDR=::1 MASTER_PORT=1234", "rank 1 of 2 from torchrun/env, rank 0's store at [::1]:1234"},
		{"agent store is exactly True", "RANK=1 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=1 TORCHELASTIC_USE_AGENT_STORE=true", "rank 1 of 2 from torchrun/env, rank 0's store at h:1"},
		{"no address", "RANK=1 WORLD_SIZE=2", "rank 1 of 2 from torchrun/env, no address of rank 0"},
		{"an empty variable is none", "RANK= OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=5", "rank 1 of 2 from Open MPI, rank 0's store at h:5"},
		{"torchrun inside srun", "RANK=9 WORLD_SIZE=16 TORCHELASTIC_RUN_ID=none MASTER_ADDR=n1 MASTER_PORT=29500 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_ID=0", "rank 9 of 16 from torchrun/env, rank 0's store at n1:29500"},
		{
			"Kubeflow Trainer v2, one rank a pod",
			"PET_NODE_RANK=2 PET_NNODES=4 PET_NPROC_PER_NODE=1 PET_MASTER_ADDR=job-node-0-0.job PET_MASTER_PORT=29500",
			"rank 2 of 4 from Kubeflow (PET), local rank 0 of 1, node 2 of 4, rank 0's store at job-node-0-0.job:29500",
		},
		{
			"Kubeflow, two ranks a pod",
			"PET_NODE_RANK=2 PET_NNODES=4:4 PET_NPROC_PER_NODE=2 LOCAL_RANK=1 PET_RDZV_ENDPOINT=job-0:23456 WORLD_SIZE=4",
			"rank 5 of 8 from Kubeflow (PET), local rank 1 of 2, node 2 of 4, rank 0's store at job-0:23456",
		},
		{
			"srun on uneven nodes",
			"SLURM_PROCID=9 SLURM_NTASKS=11 SLURM_LOCALID=1 SLURM_TASKS_PER_NODE=4(x2),3 SLURM_NODEID=2 SLURM_NNODES=3 " +
				"SLURM_STEP_NODELIST=n[08-10] SLURM_JOB_NODELIST=n[01-10] SLURM_JOB_ID=1234567 SLURM_STEP_ID=2 SLURM_RESTART_COUNT=1",
			"rank 9 of 11 from Slurm, local rank 1 of 3, node 2 of 3, rank 0's store at n08:24769, restart 1",
		},
		{
			"srun --resv-ports",
			"SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 SLURM_NTASKS=8 SLURM_LOCALID=0 SLURM_NTASKS_PER_NODE=1 SLURM_NODEID=0 SLURM_STEP_NUM_NODES=2 " +
				"SLURM_JOB_NODELIST=gpu[3,5] SLURM_STEP_RESV_PORTS=12000-12003,13000 SLURM_TASKS_PER_NODE=4(x2) SLURM_STEP_ID=0",
			"rank 0 of 2 from Slurm, local rank 0 of 1, node 0 of 2, rank 0's store at gpu3:12000",
		},
		{
			"srun on one node, as mpirun on one host",
			"SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_NTASKS=8 SLURM_LOCALID=1 SLURM_NODEID=0 SLURM_STEP_NUM_NODES=1 SLURM_NNODES=2 " +
				"SLURM_STEP_NODELIST=n02 SLURM_JOB_NODELIST=n[01-02] SLURM_JOB_ID=7 SLURM_STEP_ID=1",
			"rank 1 of 2 from Slurm, local rank 1, node 0 of 1, rank 0's store at 127.0.0.1:20108",
		},
		{
			"a part of a heterogeneous job on one node",
			"SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NODELIST=n02 SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_HET_SIZE=2",
			"rank 1 of 2 from Slurm, rank 0's store at n02:20007",
		},
		{"sbatch of one process", "SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_JOB_NODELIST=n1,n2 SLURM_JOB_ID=7", "rank 0 of 1 from Slurm, rank 0's store at n1:20007"},
		{"ranks by hand in srun's shell", "RANK=1 WORLD_SIZE=2 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_ID=0", "rank 1 of 2 from torchrun/env, no address of rank 0"},
		{"ranks by hand in a batch script", "RANK=1 WORLD_SIZE=2 SLURM_PROCID=0 SLURM_NTASKS=8", "rank 1 of 2 from torchrun/env, no address of rank 0"},
		{"RANK and WORLD_SIZE from srun's numbers", "RANK=1 WORLD_SIZE=2 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_ID=0", "rank 1 of 2 from torchrun/env, no address of rank 0"},
		{
			"srun with an address of the user's",
			"SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_JOB_NODELIST=a,b SLURM_JOB_ID=7 SLURM_STEP_ID=0 MASTER_ADDR=10.1.1.1 WORLD_SIZE=2",
			"rank 1 of 2 from Slurm, rank 0's store at 10.1.1.1:20007",
		},
		{"srun --mpi=pmi2", "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_JOB_NODELIST=a,b SLURM_JOB_ID=7 SLURM_STEP_ID=0 PMI_RANK=1 PMI_SIZE=2", "rank 1 of 2 from Slurm, rank 0's store at a:20007"},
		{
			"mpirun on one host",
			"OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=4 PMIX_NAMESPACE=7",
			"rank 1 of 4 from Open MPI, local rank 1 of 4, node 0 of 1, rank 0's store at 127.0.0.1:29206",
		},
		{
			"mpirun inside sbatch, whose SLURM_PROCID all inherit",
			"OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 " +
				"SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_JOB_ID=42 SLURM_JOB_NODELIST=n[1-2] SLURM_STEP_NODELIST=n2 SLURM_STEP_ID=0 PMIX_NAMESPACE=7",
			"rank 3 of 4 from Open MPI, local rank 1 of 2, rank 0's store at n1:29206",
		},
		{
			"MPI Operator's hostfile",
			"OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=7 OMPI_MCA_orte_default_hostfile=" + hostfile,
			"rank 3 of 4 from Open MPI, local rank 1 of 2, rank 0's store at job-worker-0.job:29206",
		},
		{
			"MVAPICH",
			"MV2_COMM_WORLD_RANK=1 MV2_COMM_WORLD_SIZE=2 MV2_COMM_WORLD_LOCAL_RANK=1 MASTER_ADDR=h MASTER_PORT=5",
			"rank 1 of 2 from MVAPICH, local rank 1, rank 0's store at h:5",
		},
		{
			"mpiexec.hydra inside sbatch",
			"PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 MASTER_PORT=5 SLURM_PROCID=0 SLURM_NTASKS=2",
			"rank 1 of 2 from Hydra (MPICH, Intel MPI), local rank 1 of 2, node 0 of 1, rank 0's store at 127.0.0.1:5",
		},
		{"PMI", "PMI_RANK=1 PMI_SIZE=2 PMI_JOBID=7 MASTER_ADDR=h", "rank 1 of 2 from PMI, rank 0's store at h:29206"},
		{"a job of one needs no name", "PMI_RANK=0 PMI_SIZE=1 MASTER_ADDR=h", "rank 0 of 1 from PMI, rank 0's store at h:29500"},
		{"PMIx", "PMIX_RANK=1 WORLD_SIZE=2 PMIX_NAMESPACE=7 MASTER_ADDR=h", "rank 1 of 2 from PMIx, rank 0's store at h:29206"},
		{
			"horovodrun",
			"HOROVOD_RANK=1 HOROVOD_SIZE=2 HOROVOD_LOCAL_RANK=1 HOROVOD_LOCAL_SIZE=2 HOROVOD_GLOO_RENDEZVOUS_ADDR=driver HOROVOD_GLOO_RENDEZVOUS_PORT=4321",
			"rank 1 of 2 from Horovod, local rank 1 of 2, node 0 of 1, rank 0's store at 127.0.0.1:26903",
		},
		{
			"LeaderWorkerSet",
			"LWS_WORKER_INDEX=3 LWS_GROUP_SIZE=4 LWS_LEADER_ADDRESS=vllm-0.vllm.default",
			"rank 3 of 4 from LeaderWorkerSet, local rank 0 of 1, node 3 of 4, rank 0's store at vllm-0.vllm.default:29500",
		},
		{
			"JobSet of several jobs",
			"JOBSET_NAME=train REPLICATED_JOB_NAME=workers REPLICATED_JOB_REPLICAS=2 JOB_INDEX=1 JOB_COMPLETION_INDEX=2 PROCESSES_IN_JOB=4 JOBSET_RESTART_ATTEMPT=3",
			"rank 6 of 8 from JobSet, local rank 0 of 1, node 6 of 8, rank 0's store at train-workers-0-0.train:29500, restart 3",
		},
		{
			"JobSet with a coordinator",
			"JOBSET_NAME=train JOB_COMPLETION_INDEX=2 WORLD_SIZE=4 JOBSET_COORDINATOR=train-driver-0-0.train:1234",
			"rank 2 of 4 from JobSet, local rank 0 of 1, node 2 of 4, rank 0's store at train-driver-0-0.train:1234",
		},
		{
			"Indexed Job",
			"JOB_COMPLETION_INDEX=1 WORLD_SIZE=2 MASTER_ADDR=pi-0.pi MASTER_PORT=777",
			"rank 1 of 2 from Kubernetes Indexed Job, local rank 0 of 1, node 1 of 2, rank 0's store at pi-0.pi:777",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			require.Equal(t, c.want, must.Get(Detect(environ(c.vars))).String())
		})
	}
}

func TestDetectRefuses(t *testing.T) {
	for _, c := range []struct{ name, vars, want string }{
		{"nothing", "", "launch: environment variable RANK expected, but not set, nor are those of any launcher: start the program with a launcher, for example `c10d run -n 2 -- PROGRAM`"},
		{"no rank", "WORLD_SIZE=4", "launch: torchrun/env: environment variable RANK expected, but not set; found WORLD_SIZE=4"},
		{
			"no world size", "RANK=1 MASTER_ADDR=10.0.0.1",
			"launch: torchrun/env: environment variables WORLD_SIZE and MASTER_PORT expected, but not set; found RANK=1, MASTER_ADDR=10.0.0.1",
		},
		{
			"half of torchrun's over all of Slurm's", "RANK=1 SLURM_PROCID=1 SLURM_NTASKS=4",
			"launch: torchrun/env: environment variable WORLD_SIZE expected, but not set; found RANK=1 (variables of Slurm are set too, which come after those of torchrun/env)",
		},
		{"half an address", "RANK=1 WORLD_SIZE=2 MASTER_PORT=5", "launch: torchrun/env: environment variable MASTER_ADDR expected, but not set; found RANK=1, WORLD_SIZE=2, MASTER_PORT=5"},
		{"no Slurm size", "SLURM_PROCID=1 SLURM_LOCALID=1", "launch: Slurm: environment variable SLURM_STEP_NUM_TASKS or SLURM_NTASKS or WORLD_SIZE expected, but not set; " +
			"srun has not started this process (SLURM_STEP_ID): a batch script starts the program with `srun PROGRAM`; found SLURM_PROCID=1, SLURM_LOCALID=1"},
		{"no Slurm size in a step", "SLURM_PROCID=1 SLURM_STEP_ID=0", "launch: Slurm: environment variable SLURM_STEP_NUM_TASKS or SLURM_NTASKS or WORLD_SIZE expected, but not set; found SLURM_PROCID=1, SLURM_STEP_ID=0"},
		{"sizes that differ", "SLURM_PROCID=1 SLURM_NTASKS=4 WORLD_SIZE=8", "launch: Slurm: WORLD_SIZE is 8, but SLURM_NTASKS says 4; found SLURM_PROCID=1, SLURM_NTASKS=4, WORLD_SIZE=8"},
		{
			"a batch script without srun", "SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_JOB_ID=7",
			"launch: Slurm: srun has not started this process (SLURM_STEP_ID): a batch script starts the program with `srun PROGRAM`; found SLURM_PROCID=0, SLURM_NTASKS=4, SLURM_JOB_ID=7",
		},
		{
			"a batch step's number", "SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_STEP_ID=4294967291",
			"launch: Slurm: srun has not started this process (SLURM_STEP_ID): a batch script starts the program with `srun PROGRAM`; found SLURM_PROCID=0, SLURM_NTASKS=4, SLURM_STEP_ID=4294967291",
		},
		{
			"stale variables in mpirun", "RANK=0 WORLD_SIZE=1 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 SLURM_PROCID=0 SLURM_NTASKS=1",
			"launch: torchrun/env: RANK and WORLD_SIZE say rank 0 of 1, but Open MPI started 4 processes (OMPI_COMM_WORLD_SIZE): unset RANK and WORLD_SIZE, " +
				"or set TORCHELASTIC_RUN_ID to a name of the job if a launcher inside Open MPI set them; found RANK=0, WORLD_SIZE=1 (variables of Open MPI and Slurm are set too, which come after those of torchrun/env)",
		},
		{
			"stale variables in mpiexec.hydra", "RANK=0 WORLD_SIZE=1 PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1",
			"launch: torchrun/env: RANK and WORLD_SIZE say rank 0 of 1, but Hydra (MPICH, Intel MPI) started 2 processes (PMI_SIZE): unset RANK and WORLD_SIZE, " +
				"or set TORCHELASTIC_RUN_ID to a name of the job if a launcher inside Hydra (MPICH, Intel MPI) set them; found RANK=0, WORLD_SIZE=1 (variables of Hydra (MPICH, Intel MPI) and PMI are set too, which come after those of torchrun/env)",
		},
		{
			"stale variables of Kubeflow", "PET_NNODES=1 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4",
			"launch: Kubeflow (PET): PET_NODE_RANK and PET_NNODES say rank 0 of 1, but Open MPI started 4 processes (OMPI_COMM_WORLD_SIZE): unset PET_NODE_RANK and PET_NNODES, " +
				"or set TORCHELASTIC_RUN_ID to a name of the job if a launcher inside Open MPI set them; found PET_NNODES=1 (variables of Open MPI are set too, which come after those of Kubeflow (PET))",
		},
		{
			"stale variables in srun", "RANK=3 WORLD_SIZE=8 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_ID=0",
			"launch: torchrun/env: RANK and WORLD_SIZE say rank 3 of 8, but Slurm started 2 processes (SLURM_STEP_NUM_TASKS): unset RANK and WORLD_SIZE, " +
				"or set TORCHELASTIC_RUN_ID to a name of the job if a launcher inside Slurm set them; found RANK=3, WORLD_SIZE=8 (variables of Slurm are set too, which come after those of torchrun/env)",
		},
		{"a node list cut short", "SLURM_PROCID=1 SLURM_NTASKS=4 SLURM_STEP_ID=0 SLURM_JOB_NODELIST=n[1-", `launch: Slurm: SLURM_JOB_NODELIST: not a Slurm list: "n[1-": a bracket is not closed; found SLURM_PROCID=1, SLURM_NTASKS=4, SLURM_JOB_NODELIST=n[1-, SLURM_STEP_ID=0`},
		{"Open MPI without size", "OMPI_COMM_WORLD_RANK=1", "launch: Open MPI: environment variable OMPI_COMM_WORLD_SIZE or WORLD_SIZE expected, but not set; found OMPI_COMM_WORLD_RANK=1"},
		{"an elastic job", "PET_NNODES=1:4 PET_NODE_RANK=0", `launch: Kubeflow (PET): PET_NNODES="1:4" is a range: only torchrun knows how many nodes came; found PET_NODE_RANK=0, PET_NNODES=1:4`},
		{"PET without nodes", "PET_NODE_RANK=1", "launch: Kubeflow (PET): environment variable PET_NNODES expected, but not set; found PET_NODE_RANK=1"},
		{"PET without node", "PET_NNODES=2", "launch: Kubeflow (PET): environment variable PET_NODE_RANK expected, but not set; found PET_NNODES=2"},
		{"several ranks a pod, which one?", "PET_NNODES=2 PET_NODE_RANK=1 PET_NPROC_PER_NODE=4", "launch: Kubeflow (PET): environment variable LOCAL_RANK expected, but not set; found PET_NODE_RANK=1, PET_NNODES=2, PET_NPROC_PER_NODE=4"},
		{"a size that overflows", "PET_NNODES=2147483647 PET_NODE_RANK=1 PET_NPROC_PER_NODE=2147483647 LOCAL_RANK=0", "launch: Kubeflow (PET): 2147483647 nodes of 2147483647 ranks are too many; found PET_NODE_RANK=1, PET_NNODES=2147483647, PET_NPROC_PER_NODE=2147483647, LOCAL_RANK=0"},
		{"a Job tells no size", "JOB_COMPLETION_INDEX=1", "launch: Kubernetes Indexed Job: environment variable WORLD_SIZE expected, but not set; found JOB_COMPLETION_INDEX=1"},
		{"a JobSet of several jobs", "JOBSET_NAME=a JOB_COMPLETION_INDEX=1 JOB_INDEX=1", "launch: JobSet: environment variable PROCESSES_IN_JOB expected, but not set; found JOBSET_NAME=a, JOB_COMPLETION_INDEX=1, JOB_INDEX=1"},
		{"a rank outside", "RANK=4 WORLD_SIZE=4", "launch: torchrun/env: rank 4 is not within a world of 4; found RANK=4, WORLD_SIZE=4"},
		{"not a number", "RANK=x WORLD_SIZE=4", `launch: torchrun/env: RANK="x" is not a number of 0 or more; found RANK=x, WORLD_SIZE=4`},
		{"negative", "RANK=-1 WORLD_SIZE=4", `launch: torchrun/env: RANK="-1" is not a number of 0 or more; found RANK=-1, WORLD_SIZE=4`},
		{"no port", "RANK=1 WORLD_SIZE=4 MASTER_ADDR=h MASTER_PORT=0", "launch: torchrun/env: MASTER_PORT=0: give a port that all ranks know, 1 to 65535; found RANK=1, WORLD_SIZE=4, MASTER_ADDR=h, MASTER_PORT=0"},
		{"no such port", "RANK=1 WORLD_SIZE=4 MASTER_ADDR=h MASTER_PORT=65536", "launch: torchrun/env: port 65536 is above 65535; found RANK=1, WORLD_SIZE=4, MASTER_ADDR=h, MASTER_PORT=65536"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := Detect(environ(c.vars))
			must.As[*Error](t, err)
			require.Equal(t, c.want, err.Error())
			require.Equal(t, c.vars == "", errors.Is(err, ErrNone))
		})
	}
}

func TestAddressMissing(t *testing.T) {
	e, err := Detect(environ("RANK=1 WORLD_SIZE=2"))
	require.NoError(t, err)
	_, err = e.Address()
	require.EqualError(t, err, "launch: torchrun/env: environment variables MASTER_ADDR and MASTER_PORT expected, but not set; found RANK=1, WORLD_SIZE=2")

	e = must.Get(Detect(environ("JOB_COMPLETION_INDEX=1 WORLD_SIZE=2 MASTER_PORT=7")))
	require.Zero(t, e.Port)
	_, err = e.Address()
	require.EqualError(t, err, "launch: Kubernetes Indexed Job: environment variable MASTER_ADDR expected, but not set; found JOB_COMPLETION_INDEX=1, WORLD_SIZE=2, MASTER_PORT=7")

	// Several jobs of mpiexec that tell no name would meet at one port.
	for vars, missing := range map[string]string{
		"PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2":                                         " MASTER_PORT",
		"PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1":                                         "s MASTER_ADDR and MASTER_PORT",
		"MV2_COMM_WORLD_RANK=1 MV2_COMM_WORLD_SIZE=2 SLURM_JOB_NODELIST=n1,n2 SLURM_JOB_ID=7":               " MASTER_PORT",
		"PMI_RANK=1 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 SLURM_JOB_NODELIST=n1,n2 SLURM_JOB_ID=7": " MASTER_PORT",
	} {
		e = must.Get(Detect(environ(vars)))
		_, err = e.Address()
		require.ErrorContains(t, err, ": environment variable"+missing+" expected, but not set; the launcher tells no name of the job, and two jobs that meet at one port would be mixed up: set MASTER_PORT", vars)
	}
}

func TestParseNodes(t *testing.T) {
	for list, want := range map[string]string{
		"n1":                       "n1",
		"n[01-03,7],m5":            "n01 n02 n03 n7 m5",
		"a,b,c":                    "a b c",
		"n[8-11]":                  "n8 n9 n10 n11",
		"n[098-101]":               "n098 n099 n100 n101",
		"r[1-2]n[0,3]-ib.c":        "r1n0-ib.c r1n3-ib.c r2n0-ib.c r2n3-ib.c",
		"[1-2]":                    "1 2",
		"n[4294967294-4294967295]": "n4294967294 n4294967295",
	} {
		hosts, err := ParseNodes(list)
		require.NoError(t, err, list)
		require.Equal(t, want, strings.Join(hosts, " "), list)
	}
	require.Len(t, must.Get(ParseNodes("n[0-65535]")), 1<<16)
	for _, list := range []string{
		"", ",", "a,,b", "a,", "n[", "n[]", "n[1", "n]", "n[1-]", "n[-1]", "n[2-1]", "n[1-2-3]", "n[a]", "n[[1]]", "a b", "n[0-65536]", "n[0-4294967295]",
		"n[0-1000]m[0-1000]", "n[0-65535],m", strings.Repeat("x", maxName+1), "n[" + strings.Repeat("0", 33) + "1]",
	} {
		require.ErrorIs(t, must.Err(ParseNodes(list)), ErrNodeList, list)
	}
}

func TestParseTasks(t *testing.T) {
	require.Equal(t, []int{4, 4, 3}, must.Get(ParseTasks("4(x2),3")))
	for _, list := range []string{"", "4(x0)", "4(x2", "4(2)", "x", "4,", "-1", "1(x65537)", "1(x65536),1", "1(x99999999999)"} {
		require.ErrorIs(t, must.Err(ParseTasks(list)), ErrNodeList, list)
	}
}

func FuzzParseNodes(f *testing.F) {
	for _, s := range []string{"n[01-03,7],m5", "r[1-2]n[0,3]-ib", "a,b", "n[0-65535]", "n[", "[[", "]"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, list string) {
		hosts, err := ParseNodes(list)
		if err != nil {
			require.ErrorIs(t, err, ErrNodeList)
			return
		}
		require.NotEmpty(t, hosts)
		require.LessOrEqual(t, len(hosts), maxNodes)
		for _, h := range hosts {
			if h == "" || strings.ContainsAny(h, "[], ") {
				t.Fatalf("host %q of %q", h, list)
			}
		}
		// What has no brackets is a list already.
		if !strings.Contains(list, "[") {
			require.Equal(t, list, strings.Join(hosts, ","))
		}
	})
}

func FuzzParseTasks(f *testing.F) {
	f.Add("4(x2),3")
	f.Fuzz(func(t *testing.T, list string) {
		tasks, err := ParseTasks(list)
		if err != nil {
			require.ErrorIs(t, err, ErrNodeList)
			return
		}
		require.LessOrEqual(t, len(tasks), maxNodes)
	})
}

// TestListenAddr has a store listen where its address says, if that is this host's.
func TestListenAddr(t *testing.T) {
	want := map[string]string{
		"127.0.0.1:29500":     "127.0.0.1:29500",
		"127.0.0.9:29500":     "127.0.0.9:29500",
		"[::1]:29500":         "[::1]:29500",
		"localhost:29500":     "localhost:29500",
		"node0.example:29500": ":29500",
		"203.0.113.77:29500":  ":29500", // of documentation: nobody's
	}
	addrs := must.Get(net.InterfaceAddrs())
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok {
			at := net.JoinHostPort(n.IP.String(), "29500")
			want[at] = at
		}
	}
	for addr, listen := range want {
		require.Equal(t, listen, ListenAddr(addr))
	}
}
