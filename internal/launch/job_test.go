package launch

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
)

// TestRunID states what each launcher calls its job.
func TestRunID(t *testing.T) {
	for vars, want := range map[string]string{
		"RANK=0 WORLD_SIZE=1 TORCHELASTIC_RUN_ID=x":                                                                "x",
		"RANK=0 WORLD_SIZE=1 TORCHELASTIC_RUN_ID=none":                                                             "",
		"RANK=0 WORLD_SIZE=1 PMIX_NAMESPACE=7":                                                                     "", // who sets RANK may join several launchers' ranks
		"PET_NODE_RANK=0 PET_NNODES=1 PET_RDZV_ID=x":                                                               "x",
		"OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 PMIX_NAMESPACE=7 OMPI_MCA_ess_base_jobid=8":                 "7",
		"OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 OMPI_MCA_ess_base_jobid=8":                                  "8",
		"OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 PMIX_NAMESPACE=7 OMPI_MCA_orte_precondition_transports=a-b": "7/a-b",
		"OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 SLURM_JOB_ID=9":                                             "9",
		"MV2_COMM_WORLD_RANK=0 MV2_COMM_WORLD_SIZE=1 PMI_JOBID=j":                                                  "j",
		"PMIX_RANK=0 PMI_SIZE=1 PMIX_NAMESPACE=slurm.pmix.9.0":                                                     "slurm.pmix.9.0",
		"HOROVOD_RANK=0 HOROVOD_SIZE=1 HOROVOD_GLOO_RENDEZVOUS_ADDR=h HOROVOD_GLOO_RENDEZVOUS_PORT=4321":           "h:4321",
		"HOROVOD_RANK=0 HOROVOD_SIZE=1":                                                                            "",
		"SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_JOB_ID=9 SLURM_STEP_ID=2":                                             "9.2",
		"SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_JOB_ID=9 SLURM_STEP_ID=2 SLURM_HET_SIZE=2":                            "",
		"LWS_WORKER_INDEX=0 LWS_GROUP_SIZE=1 LWS_LEADER_ADDRESS=a-0.a.ns":                                          "", // as that of the set before it
		"JOBSET_NAME=j JOB_COMPLETION_INDEX=0 WORLD_SIZE=1":                                                        "", // may be made anew
		"JOBSET_NAME=j JOBSET_UID=u JOB_COMPLETION_INDEX=0 WORLD_SIZE=1":                                           "u",
		"JOB_COMPLETION_INDEX=0 WORLD_SIZE=1 JOB_UID=u":                                                            "u",
	} {
		e, err := Detect(environ(vars))
		require.NoError(t, err, vars)
		require.Equal(t, want, e.RunID, vars)
	}
}

// TestPortOfAJob: mpirun's jobs on one host have ports of their own, the same on
// all ranks, unless somebody chose one.
func TestPortOfAJob(t *testing.T) {
	port := func(vars string) int {
		t.Helper()
		e, err := Detect(environ("OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=2 " + vars))
		require.NoError(t, err)
		return e.Port
	}
	a := port("OMPI_COMM_WORLD_RANK=0 PMIX_NAMESPACE=839974913")
	require.Equal(t, a, port("OMPI_COMM_WORLD_RANK=1 PMIX_NAMESPACE=839974913"))
	require.NotEqual(t, a, port("OMPI_COMM_WORLD_RANK=0 PMIX_NAMESPACE=839319553"))
	require.Equal(t, a, port("OMPI_COMM_WORLD_RANK=0 PMIX_NAMESPACE=839974913 MASTER_ADDR=h"))
	require.Equal(t, 29501, port("OMPI_COMM_WORLD_RANK=0 PMIX_NAMESPACE=839974913 MASTER_PORT=29501"))
	require.Zero(t, port("OMPI_COMM_WORLD_RANK=0"), "a port that is a guess")
	for i := range 10000 {
		p := portOf(strings.Repeat("x", i%100) + string(rune(i)))
		require.True(t, p >= 20000 && p < 30000, p)
	}
}

func TestParseRange(t *testing.T) {
	for text, want := range map[string][2]int{"2:4": {2, 4}, "3": {3, 3}, "1:1": {1, 1}} {
		least, most, err := ParseRange(text)
		require.NoError(t, err)
		require.Equal(t, want, [2]int{least, most})
	}
	for _, text := range []string{"", ":", "2:", ":2", "0:1", "4:2", "-1", "2:4:6", "x"} {
		_, _, err := ParseRange(text)
		require.ErrorContains(t, err, "is no range of ranks, such as 2:4", text)
	}
}

func TestEpochFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "epoch.json")
	require.ErrorIs(t, must.Err(ReadEpoch(path)), os.ErrNotExist)
	for n := range 2 {
		e := Epoch{Epoch: n + 1, ID: 3, IDs: []int{0, 3}, Left: []Absent{{1, "it died"}}}
		require.NoError(t, WriteEpoch(path, e))
		require.Equal(t, e, must.Get(ReadEpoch(path)))
	}
}
