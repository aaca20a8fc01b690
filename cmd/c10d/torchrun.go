package main

import (
	"errors"
	"flag"
	"fmt"
	"net"
	"runtime"
	"strconv"
	"strings"
)

// hidden is the usage text of a flag that help does not list.
const hidden = "\x00hidden"

// torchrunFlags adds torchrun's spellings to the flags of "c10d run". Flags with the same
// meaning set the same value. The others return an error that says what to do instead. It
// returns a map from torchrun's flags to the flags of "c10d run".
func torchrunFlags(flags *flag.FlagSet, r *rendezvous) map[string]string {
	ours := make(map[string]string)
	both := func(name string, add func(string)) {
		add(name)
		if other := strings.ReplaceAll(name, "-", "_"); other != name {
			add(other)
		}
	}
	alias := func(name, our string) {
		both(name, func(name string) {
			if name != our {
				flags.Var(flags.Lookup(our).Value, name, hidden)
				ours[name] = our
			}
		})
	}
	alias("nproc-per-node", "n")
	alias("np", "n") // mpirun's
	for _, same := range []string{"node-rank", "master-addr", "master-port", "max-restarts", "log-dir", "run-id", "rdzv-timeout"} {
		alias(same, same)
	}
	alias("rdzv-id", "run-id")
	both("rdzv-endpoint", func(name string) { flags.StringVar(&r.endpoint, name, "", hidden) })
	both("standalone", func(name string) { flags.BoolVar(&r.standalone, name, false, hidden) })
	both("no-python", func(name string) { flags.Bool(name, true, hidden) }) // as always here
	both("rdzv-backend", func(name string) {
		flags.Func(name, hidden, func(s string) error {
			if s != "c10d" && s != "static" {
				return errors.New("c10d run has no etcd: its nodes meet at -master-addr and -master-port")
			}
			return nil
		})
	})
	for name, instead := range map[string]string{
		"rdzv-conf":          "use -rdzv-timeout",
		"redirects":          "use -log-dir",
		"r":                  "use -log-dir",
		"t":                  "use -log-dir with -tee",
		"local-addr":         "leave it out: node 0 has -master-addr",
		"local-ranks-filter": "leave it out: each line of output begins with its rank",
		"monitor-interval":   "leave it out: c10d run notices the end of a rank at once",
		"start-method":       "leave it out: each rank is a program of its own",
		"role":               "leave it out: all ranks have the role default",
		"logs-specs":         "use -log-dir",
		"m":                  "name the program: c10d run -n 2 -- python3 -m MODULE",
		"module":             "name the program: c10d run -n 2 -- python3 -m MODULE",
		"run-path":           "name the program: c10d run -n 2 -- python3 SCRIPT",
	} {
		both(name, func(name string) {
			refuse := func(string) error { return errors.New("this is a flag of torchrun; " + instead) }
			if name == "m" || name == "module" || name == "run-path" || name == "run_path" {
				flags.BoolFunc(name, hidden, refuse)
			} else {
				flags.Func(name, hidden, refuse)
			}
		})
	}
	return ours
}

// rendezvous is where torchrun's flags say that the nodes meet.
type rendezvous struct {
	endpoint   string
	standalone bool
}

// torchrunPort is torchrun's default port of an endpoint.
const torchrunPort = 29400

// apply fills in the address that the flags of ours have not set.
func (r *rendezvous) apply(given map[string]bool, addr *string, port *int, nodes int) error {
	if r.standalone && nodes > 1 {
		return usagef("-standalone is for one node, not for -nnodes %d", nodes)
	}
	if r.endpoint == "" || r.standalone {
		return nil
	}
	if given["master-addr"] || given["master-port"] {
		return usagef("-rdzv-endpoint %s stands for -master-addr and -master-port: give either", r.endpoint)
	}
	if nodes > 1 && !given["node-rank"] {
		return usagef("-rdzv-endpoint with -nnodes %d needs -node-rank too: 0 on the host of the endpoint, and another number on each other node", nodes)
	}
	host, service := r.endpoint, strconv.Itoa(torchrunPort)
	if h, p, err := net.SplitHostPort(r.endpoint); err == nil {
		host, service = h, p
	}
	n, err := strconv.Atoi(service)
	if err != nil || n < 0 || n > 65535 {
		return usagef("-rdzv-endpoint %q has no port within 0 and 65535: give host:port", r.endpoint)
	}
	*addr, *port = host, n
	return nil
}

// rankCount is the flag for a number of ranks. It accepts some of torchrun's words.
type rankCount int

func (r *rankCount) String() string { return strconv.Itoa(int(*r)) }

func (r *rankCount) Set(s string) error {
	switch s {
	case "cpu":
		*r = rankCount(runtime.NumCPU())
		return nil
	case "auto", "gpu", "xpu":
		return fmt.Errorf("c10d run does not count devices: give the number of ranks")
	}
	n, err := strconv.Atoi(s)
	if err != nil {
		return errors.New("want a number of ranks, or cpu for one on each CPU")
	}
	*r = rankCount(n)
	return nil
}

// nodeCount is the flag for a number of nodes; torchrun also takes ranges.
type nodeCount int

func (n *nodeCount) String() string { return strconv.Itoa(int(*n)) }

func (n *nodeCount) Set(s string) error {
	if low, high, ranged := strings.Cut(s, ":"); ranged {
		if low != high {
			return errors.New("give one number of nodes; -elastic changes the number of ranks")
		}
		s = low
	}
	v, err := strconv.Atoi(s)
	if err != nil {
		return errors.New("want a number of nodes")
	}
	*n = nodeCount(v)
	return nil
}
