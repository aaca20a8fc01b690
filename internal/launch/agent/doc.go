// Package agent is the launcher of the command "c10d run". It starts the ranks of a job on
// this host with torchrun's environment variables, shows what they print, and ends all of
// them when one fails.
//
// # What a rank gets
//
// The agent of node 0 hosts the store, a new one for each attempt. The ranks know this by
// TORCHELASTIC_USE_AGENT_STORE=True. The store stays when a rank dies. Each rank has a
// process group of its own, no standard input, and the names of two files and a directory:
//
//   - TORCHELASTIC_ERROR_FILE: the rank may write the reason of its failure there, in torchrun's JSON form
//   - C10D_FAILURE_FILE: package pg notes there which rank ended its group
//   - C10D_SCRATCH_DIR: a directory that the ranks of the node share during an attempt
//
// They are in a directory of the agent, under the system's temporary directory (os.TempDir). The agent removes it at
// the end; if the agent is killed, its guard does. Copies of the error files of failed ranks stay in Job.LogDir.
//
// # Ranks that end early
//
// A rank may end with exit code 0 while others wait for it in pg.Init. The agent writes to the ranks' store that it has
// ended (launch.EndedKey). Init fails on the others within a second, and names it. Only ranks that wait in Init look
// there.
//
// # How a job ends
//
// A rank fails by ending with an exit code other than 0, or by a signal. The rank that
// ends first is often not the one at fault. A Go rank that panics leaves its group first,
// then the others fail and end, and only then it prints the panic. After the first failure
// the agent therefore waits:
//
//   - 200 ms for other ranks to end
//   - up to 1 s while a rank writes to its standard error
//   - up to 3 s for a rank that others name, or that is printing a panic
//
// Then the other ranks get SIGTERM, and SIGKILL after Job.Grace. A stopped rank
// goes on, so that it can take the SIGTERM. Whatever a rank leaves behind in its process
// group dies with it.
//
// The agent then looks for the rank at fault. What groups noted counts most, then Go panics
// and signals, and last the time. What ranks print does not count. The
// rank at fault need not have failed: it may be stopped, or have ended with exit code 0
// while others needed it. Ranks of PyTorch note nothing. If no Go rank failed beside them,
// the first to end is the one at fault. A rank that only stopped is then not found.
//
// Then there is another attempt, after a pause of 100 ms. Each further pause is twice as long, up to 30 s. After an
// attempt of a minute or more they begin anew. A signal on any node ends the pause, and the job. After the last attempt the Summary describes the rank at
// fault and lists the others that failed.
//
// # Elastic jobs
//
// With Job.Least and Job.Most a rank that fails is started again alone, and the others go on. Once the
// group has been made it gets C10D_JOIN=1, so that pg.Init joins the group. Before that it takes its place
// in Init again. All ranks get C10D_ELASTIC with the two numbers.
// TORCHELASTIC_RESTART_COUNT stays 0, and the store the same. Each rank writes the epochs of its group
// to the file C10D_EPOCH_FILE. The agent logs the members of each epoch.
//
// Every agent publishes how many of its ranks run, are in the group, and have ended with 0. Node 0
// declares the end. The job fails if fewer than Job.Least ranks are left, or no member of the group.
// It succeeds if all ranks have ended, and Job.Least of them with 0; without a group, none may have failed. After the
// first that ends with 0 no rank is started again. Ranks that wait to join get SIGTERM, and SIGKILL after Job.Grace. When
// another node's agent dies, its ranks end with it.
//
// # Signals
//
// A signal from Job.Signals is passed on to every rank's process group. Ranks
// that are still there Job.Grace later get SIGKILL; a second signal has that
// effect at once. There is no further attempt, on any node. If ranks of another node still run when
// those of this one have ended with 0, the agent waits for them; a signal ends that, too. In an
// elastic job a signal on another node than node 0 ends the ranks of that node, and the others go on.
//
// The guard is a process that waits for the agent's end. If the agent is killed, the kernel
// kills the ranks (on Linux). The guard kills all processes in their process groups (on
// every Unix) and removes the agent's directory. Only a process that has made a session or
// process group of its own survives.
//
// Process 1 of a container gets the processes whose parents have ended. "c10d run" then runs Init, which starts the
// launcher as a child, passes signals on, and reaps.
//
// # Several nodes
//
// With Job.Nodes above 1, an agent runs on each. They meet in a store that node
// 0 hosts at Job.MasterAddr and Job.MasterPort; nodes may have different numbers
// of ranks. Nodes, MaxRestarts, Least and Most must be the same on all. A failure on one node
// ends the attempt on all. The end of an agent ends the job, unless its ranks have all ended
// with 0. Every agent tells node 0 what it knows of its ranks. Node 0 finds the one at fault,
// and every agent reports it. The ranks' store is another one, on a port that node 0 picks.
//
// # Strangers
//
// Job.Secrets protect the stores of agents and ranks with TLS, a token, or both. The ranks get
// the names of the files in C10D_TLS_CERT, C10D_TLS_KEY and C10D_TLS_CA. pg.Init
// reads these, so TLS also protects the connections between ranks. Ranks of PyTorch can use
// neither. Without secrets, anyone who reaches a store can read and change its keys. They have
// the addresses of the ranks. Ranks without TLS also have the secrets there by which they
// recognise each other.
package agent
