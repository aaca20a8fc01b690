// Package launch reads the environment variables of launchers: which rank this process is,
// how many ranks there are, and where rank 0 hosts the store.
//
// Every launcher has its own variables: torchrun says RANK and WORLD_SIZE, srun
// SLURM_PROCID and SLURM_NTASKS, mpirun OMPI_COMM_WORLD_RANK. Detect reads the
// first launcher in this order that has set any variable of its own:
//
//	launcher         rank from                            rank 0's host and port
//	torchrun, env    RANK, WORLD_SIZE                     MASTER_ADDR, MASTER_PORT (required)
//	Kubeflow (PET)   PET_NODE_RANK, PET_NNODES,           PET_MASTER_ADDR, PET_MASTER_PORT or
//	                 PET_NPROC_PER_NODE, LOCAL_RANK       PET_RDZV_ENDPOINT
//	Horovod          HOROVOD_RANK, HOROVOD_SIZE           this host, if all ranks are on it
//	Open MPI         OMPI_COMM_WORLD_RANK, _SIZE          this host, or the first of the Slurm job
//	MVAPICH          MV2_COMM_WORLD_RANK, _SIZE           or of the MPI Operator's hostfile
//	Hydra            PMI_RANK with MPI_LOCALRANKID        (MPICH, Intel MPI)
//	Slurm            SLURM_PROCID, SLURM_STEP_NUM_TASKS   this host, if all ranks are on it, or the
//	                                                      first of SLURM_STEP_NODELIST; port from
//	                                                      SLURM_STEP_RESV_PORTS or the job's number
//	PMI, PMIx        PMI_RANK, PMI_SIZE; PMIX_RANK        as Open MPI
//	LeaderWorkerSet  LWS_WORKER_INDEX, LWS_GROUP_SIZE     LWS_LEADER_ADDRESS
//	JobSet           JOBSET_NAME, JOB_COMPLETION_INDEX    pod 0 of job 0
//	Indexed Job      JOB_COMPLETION_INDEX, WORLD_SIZE     MASTER_ADDR (required)
//
// An mpirun comes before Slurm because it may run inside a Slurm job, whose
// variables its ranks then inherit, with one and the same SLURM_PROCID. Plain
// PMI variables come after it, because srun itself sets them.
//
// MASTER_ADDR and MASTER_PORT replace the address of rank 0 that a launcher tells:
// `MASTER_ADDR=... srun prog` is a common idiom. WORLD_SIZE is the size if the launcher
// tells none, as for a Kubernetes Job. If the launcher tells one, both must be equal, also
// where RANK is set. Only torchrun and c10d run, which name their job in TORCHELASTIC_RUN_ID, may
// start other ranks inside an mpirun or srun of several processes.
//
// # The job's name and port
//
// Env.RunID is a name for the job that all its ranks have and other jobs have not:
//
//	torchrun, c10d run   TORCHELASTIC_RUN_ID, PET_RDZV_ID, unless it is torchrun's default, "none"
//	Open MPI, PMIx       PMIX_NAMESPACE or OMPI_MCA_ess_base_jobid, with the random key
//	                     OMPI_MCA_orte_precondition_transports where there is one
//	other MPI            PMI_JOBID. On Linux also the process of hydra or mpispawn that started
//	                     this one; across hosts, the address at which that finds mpiexec
//	Horovod              HOROVOD_GLOO_RENDEZVOUS_ADDR and _PORT
//	Slurm                SLURM_JOB_ID and SLURM_STEP_ID; none in a heterogeneous job
//	JobSet               JOBSET_UID
//	Indexed Job          JOB_UID
//
// The name of a Kubernetes object is no name for the job: the object may be made anew under it.
//
// If an MPI launcher tells no port, Detect makes the store's port from that name: 20000 to
// 29999. MASTER_PORT replaces it, and is required if several ranks have no name. Two jobs of
// mpirun on one host therefore have two stores. If their ports are equal, the store refuses the
// other job's ranks (tcp.Options.Job).
//
// Kubernetes gives a JobSet's pods labels, not variables. Expose them through
// the downward API under these names (examples/kubernetes has manifests):
//
//	JOBSET_NAME               jobset.sigs.k8s.io/jobset-name
//	REPLICATED_JOB_NAME       jobset.sigs.k8s.io/replicatedjob-name
//	REPLICATED_JOB_REPLICAS   jobset.sigs.k8s.io/replicatedjob-replicas
//	JOB_INDEX                 jobset.sigs.k8s.io/job-index
//	JOBSET_RESTART_ATTEMPT    jobset.sigs.k8s.io/restart-attempt
//	JOBSET_COORDINATOR        jobset.sigs.k8s.io/coordinator
//	JOBSET_UID                jobset.sigs.k8s.io/jobset-uid
//	PROCESSES_IN_JOB          the pods of one job (its completions), a number of yours
//
// and that of an Indexed Job that shares a store with others under this:
//
//	JOB_UID                   batch.kubernetes.io/controller-uid
//
// Incomplete variables are an error. Detect does not guess, and does not complete them from
// another launcher's variables: ranks that guess differently would wait for each other
// until their timeout. The error is an *Error and lists the variables that were found and
// those that are missing.
package launch
