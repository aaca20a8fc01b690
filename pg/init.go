package pg

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/cputime"
	"github.com/c10d-go/c10d/internal/credentials"
	"github.com/c10d-go/c10d/internal/launch"
	"github.com/c10d-go/c10d/internal/meet"
	"github.com/c10d-go/c10d/internal/option"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/store/tcp"
	"github.com/c10d-go/c10d/trace"
)

// InitOptions are the options of Init. The zero value works.
type InitOptions struct {
	Options
	Rank, Size int    // where neither the URL nor a launcher says so; Size 0 means that neither is given
	Join       bool   // a default group that exists, see Join; C10D_JOIN=1 sets it, and Rank and Size have no effect
	Listen     string // where rank 0 hosts the store; empty means the ranks' address if numeric, else all interfaces
	// Security and TLS protect the store and the ranks' connections. Without them C10D_TLS_CERT, C10D_TLS_KEY,
	// C10D_TLS_CA and C10D_TLS_SECRET do. TLS needs RootCAs, and a certificate for both sides that is valid for
	// this rank's address or ServerName. With TLS every process of the job must have it.
	Security    Security
	TLS         *tls.Config
	StoreServer tcp.ServerOptions // limits of the store that rank 0 hosts

	secretTLS bool // TLS comes from a secret
}

// podTimeout is how long the name of rank 0 is looked up in a Kubernetes cluster. The name
// appears when the pod runs; it may have to pull an image first.
const podTimeout = 5 * time.Minute

// Init makes the default group as c10d's init_process_group does. It opens the store of a URL (empty means env://),
// finds out rank and size, and calls New. Close closes the store as well.
//
//   - env:// is for what a launcher says, see docs/launchers.md
//   - tcp://host:port is for a TCP store that rank 0 hosts there
//   - file:///path is for a file on a disk that all ranks share
//   - redis://host:port/db is for Redis, with import _ ".../c10d/store/redis"
//
// Rank and size come from InitOptions, from the URL's parameters rank and world_size, or from a launcher. The parameter
// prefix separates jobs in one store. Variables such as C10D_TRACE are in docs/environment.md.
func Init(ctx context.Context, url string, o ...InitOptions) (*ProcessGroup, error) {
	g, err := initFrom(ctx, url, option.Last(o), os.Getenv)
	if err != nil {
		return nil, fmt.Errorf("pg: Init: %w", err)
	}
	return g, nil
}

// lastWords is how long a rank that hosts the store and fails keeps it for the others. Time for which it waits for a CPU
// does not count: the others wait for one, too.
const lastWords = 500 * time.Millisecond

func initFrom(ctx context.Context, rawURL string, o InitOptions, getenv func(string) string) (*ProcessGroup, error) {
	prefix := getenv(traceVariable)
	if o.Recorder == nil {
		o.Recorder = trace.New()
	}
	dumps := o.Recorder.Adopt(prefix, getenv("C10D_TRACE_STACKS") == "1") && prefix != ""
	if prefix != "" && !dumps {
		logger := o.Logger
		if logger == nil {
			logger = slog.Default()
		}
		logger.Warn("c10d: "+traceVariable+" is not used: the program's Recorder has a prefix of its own, was in a group before, or is trace.Off", "prefix", o.Recorder.Prefix())
	}
	if err := o.check(); err != nil {
		return nil, err
	}
	if o.Timeout <= 0 {
		o.Timeout = backend.DefaultTimeout
	}
	if sizes := getenv(launch.ElasticVariable); sizes != "" {
		var err error
		if o.least, o.most, err = launch.ParseRange(sizes); err != nil {
			return nil, fmt.Errorf("environment variable %s: %w", launch.ElasticVariable, err)
		}
		o.Elastic = true
	}
	o.Join = o.Join || getenv(launch.JoinVariable) == "1"
	m, err := resolve(rawURL, o, getenv)
	if err != nil {
		return nil, err
	}
	if err := o.secrets(m.scheme, getenv); err != nil {
		return nil, err
	}
	if o.Logger != nil {
		o.Logger.Info("launch: " + m.env.String())
	}
	if getenv("TORCH_DIST_INIT_BARRIER") == "1" {
		o.InitBarrier = true
	}
	switch level := getenv("TORCH_DISTRIBUTED_DEBUG"); strings.ToUpper(level) {
	case "DETAIL":
		o.Detail = true
	case "", "OFF", "INFO":
	default:
		return nil, fmt.Errorf("TORCH_DISTRIBUTED_DEBUG is %q; it must be OFF, INFO or DETAIL", level)
	}
	stop, err := debugPage(&o, m.env, getenv)
	if err != nil {
		return nil, err
	}
	if dumps {
		page, signals := stop, o.Recorder.DumpOnSignal(o.Logger)
		stop = func() {
			signals()
			page()
		}
	}
	g, err := initGroup(ctx, o, m)
	if err != nil {
		if !o.Join { // which has no rank yet
			noteUnmade(m.env.Rank, m.env.Size, err)
		}
		stop()
		return nil, err
	}
	g.released = stop
	return g, nil
}

// traceVariable is the environment variable with the prefix of the files that ranks dump their last operations to.
const traceVariable = "C10D_TRACE"

// initGroup makes the default group of a rank.
func initGroup(ctx context.Context, o InitOptions, m *meeting) (*ProcessGroup, error) {
	st, err := m.open(ctx, o)
	if err != nil {
		err = public(m.orTwice(ctx, o, err))
		o.failed(cmp.Or(o.Name, "0"), m.env.Rank, m.env.Size, nil, err)
		return nil, err
	}
	from := origin{job: m.job, attempt: m.env.RestartCount, tls: o.TLS, hosted: -1}
	if t, ok := st.(*tcp.Store); ok {
		from.seen = m.seenIn(t)
		if !m.env.AgentStore {
			from.hosted = 0
		} else if m.numbered {
			from.ended = endedIn(st, m.env.Size)
		}
	}
	if m.env.AgentStore {
		from.agents = st
	}
	var g *ProcessGroup
	if keys := store.Prefix("default_pg", st); o.Join {
		from.hosted, from.seen = -1, nil
		g, err = joinWorld(ctx, keys, o.Options, from)
	} else {
		g, err = newWorld(ctx, keys, m.env.Rank, m.env.Size, o.Options, from)
	}
	if err != nil {
		if t, ok := st.(*tcp.Store); ok {
			// The others have to hear why before the store ends.
			last, cancel := cputime.WithTimeout(context.WithoutCancel(ctx), lastWords)
			t.Drain(last)
			cancel()
		}
		return nil, errors.Join(err, st.Close())
	}
	w := g.now().world
	w.owned = st
	if !o.Join {
		tellLauncher(launch.Epoch{ID: w.rank, IDs: allRanks(w.size)})
	}
	if t, ok := st.(*tcp.Store); ok && t.Server() == nil && !m.env.AgentStore && !o.Join {
		rank := m.env.Rank
		w.left = func() {
			ctx, cancel := cputime.WithTimeout(context.Background(), lastLook)
			defer cancel()
			_ = t.Leave(ctx, rank) // if the server has ended, nobody can join it
		}
	}
	return g, nil
}

// secrets takes TLS from Security or the environment if o has none.
func (o *InitOptions) secrets(scheme string, getenv func(string) string) error {
	f := credentials.Files(o.Security)
	switch {
	case f.TLS() && o.TLS != nil:
		return errors.New("both Security and TLS are set: give one")
	case o.TLS == nil && !f.TLS():
		f = credentials.FromEnv(getenv)
	}
	err := f.CheckMutual()
	if err != nil {
		return err
	}
	if f.Secret != "" && scheme == "rediss" {
		return errors.New("a Redis server has no part in the job's secret: give Cert, Key and CA for rediss://, or let the ranks meet at tcp:// or env://")
	}
	secure, err := f.Load()
	if secure != nil {
		o.TLS, o.secretTLS = secure, f.Secret != ""
	}
	return err
}

// meeting says how this rank meets the others: the store, its rank and the size.
type meeting struct {
	scheme string
	addr   string       // of a TCP store
	path   string       // of a file
	opener store.Opener // of a scheme that is registered
	url    string       // for it, without our parameters
	prefix string       // of the keys there
	job    string       // the launcher's name for it
	env    launch.Env

	numbered bool // by the launcher: the caller has given no other rank and no other size

	resolveTimeout time.Duration // see tcp.Options
}

// resolve turns a URL, options and environment into a meeting.
func resolve(rawURL string, o InitOptions, getenv func(string) string) (*meeting, error) {
	if rawURL == "" {
		rawURL = "env://"
	}
	u, err := url.Parse(strings.TrimSpace(rawURL))
	if err != nil {
		return nil, errors.New("the URL cannot be parsed") // its text may hold a password
	}
	m := &meeting{scheme: u.Scheme}
	if getenv("KUBERNETES_SERVICE_HOST") != "" {
		m.resolveTimeout = podTimeout
	}
	q := u.Query()
	param := func(name string) string {
		v := q.Get(name)
		q.Del(name)
		return v
	}
	rank, size := param("rank"), param("world_size")
	param("use_libuv") // chooses among PyTorch's servers
	switch m.scheme {
	case "env":
	case "tcp":
		m.addr = u.Host
		if u.Hostname() == "" || u.Port() == "" {
			return nil, fmt.Errorf("tcp:// needs host and port, not %q", u.Host)
		}
		if _, err := launch.Host("the URL's host", u.Hostname()); err != nil {
			return nil, err
		}
	case "file":
		m.path = u.Path
		if u.Host != "" && u.Host != "localhost" || u.Path == "" || u.Path == "/" {
			return nil, fmt.Errorf("file:// needs the absolute path of a file, not %q", u.Host+u.Path)
		}
	default:
		if m.opener, err = store.Lookup(m.scheme); err != nil {
			return nil, err
		}
		m.prefix = param("prefix")
	}
	if m.opener != nil {
		u.RawQuery = q.Encode()
		m.url = u.String()
	} else if len(q) > 0 {
		return nil, fmt.Errorf("%s:// has no parameter %q", m.scheme, slices.Sorted(maps.Keys(q))[0])
	}
	if rank, err = given("rank", rank, o.Rank, o.Size > 0); err != nil {
		return nil, err
	}
	if size, err = given("world_size", size, o.Size, o.Size > 0); err != nil {
		return nil, err
	}
	if o.Size < 0 || o.Size == 0 && o.Rank != 0 {
		return nil, fmt.Errorf("Rank is %d and Size is %d: give both, with Rank below Size", o.Rank, o.Size)
	}
	if m.env, err = detect(m.scheme, rank, size, getenv); err != nil {
		return nil, err
	}
	m.numbered = (rank == "" || rank == getenv("RANK")) && (size == "" || size == getenv("WORLD_SIZE"))
	// The ranks of a world that the caller numbers may come from several launchers.
	if rank == "" || size == "" {
		m.job = m.env.RunID
	}
	switch m.scheme {
	case "env":
		m.addr, err = m.env.Address()
		return m, sayGiven(err, rank, size)
	case "tcp":
		m.env.Addr = u.Hostname()
		if m.env.Port, err = strconv.Atoi(u.Port()); m.env.Port == 0 && m.env.Size > 1 {
			err = errors.New("tcp:// with port 0: give a port that all ranks know")
		}
	case "file":
	default:
		err = m.choosePrefix()
	}
	// An agent's store elsewhere is not the one that is meant.
	agent := net.JoinHostPort(getenv("MASTER_ADDR"), getenv("MASTER_PORT"))
	m.env.AgentStore = m.env.AgentStore && m.addr == agent
	return m, err
}

// choosePrefix chooses where a job's keys go in a store that outlives it.
func (m *meeting) choosePrefix() error {
	if m.prefix == "" {
		m.prefix = m.env.RunID
	}
	if m.prefix == "" {
		return fmt.Errorf("%s:// needs a name that tells this run from others: ?prefix=NAME", m.scheme)
	}
	if m.env.RestartCount > 0 {
		m.prefix += "/attempt_" + strconv.Itoa(m.env.RestartCount)
	}
	return nil
}

// given returns the text of a number that the URL, the options or both say.
func given(name, inURL string, option int, optionSet bool) (string, error) {
	if inURL != "" {
		n, err := strconv.Atoi(inURL)
		if err != nil || n < 0 {
			return "", fmt.Errorf("%s=%q in the URL is not a number of 0 or more", name, inURL)
		}
		if optionSet && n != option {
			return "", fmt.Errorf("%s is %d in the URL and %d in the options", name, n, option)
		}
	} else if optionSet {
		return strconv.Itoa(option), nil
	}
	return inURL, nil
}

// detect asks the environment for what was not given.
func detect(scheme, rank, size string, getenv func(string) string) (launch.Env, error) {
	if scheme != "env" {
		switch {
		case rank != "" && size == "":
			return launch.Env{}, fmt.Errorf("%s:// with a rank needs world_size too", scheme)
		case rank == "" && size != "":
			return launch.Env{}, fmt.Errorf("%s:// with a world_size needs rank too", scheme)
		}
	}
	all := rank != "" && size != ""
	if all {
		r, err := strconv.Atoi(rank)
		n, err2 := strconv.Atoi(size)
		if err == nil && err2 == nil && (r < 0 || r >= n) {
			return launch.Env{}, fmt.Errorf("rank %d is not within a world of %d: the caller gave both, in InitOptions or in the URL", r, n)
		}
	}
	e, err := launch.Detect(func(name string) string {
		switch {
		case name == "RANK" && rank != "":
			return rank
		case name == "WORLD_SIZE" && size != "":
			return size
		case name == "MASTER_ADDR" || name == "MASTER_PORT":
			if scheme != "env" {
				return ""
			}
		case all && !strings.HasPrefix(name, "TORCHELASTIC_"):
			return "" // local ranks and nodes of some other world
		}
		return getenv(name)
	})
	if all {
		e.Source = "the caller"
	}
	err = sayGiven(err, rank, size)
	if scheme != "env" && errors.Is(err, launch.ErrNone) {
		err = fmt.Errorf("%w, or give rank and size in InitOptions or in the URL (?rank=0&world_size=2)", err)
	}
	return e, err
}

// sayGiven names the caller in an error about a launcher's variables in whose place the
// caller has given the rank, the size or both.
func sayGiven(err error, rank, size string) error {
	var e *launch.Error
	if !errors.As(err, &e) || rank == "" && size == "" {
		return err
	}
	said := *e
	said.Found = nil
	for _, kv := range e.Found {
		switch name, value, _ := strings.Cut(kv, "="); {
		case name == "RANK" && rank != "":
			kv = "rank " + value + " given by the caller"
		case name == "WORLD_SIZE" && size != "":
			kv = "world size " + value + " given by the caller"
		}
		said.Found = append(said.Found, kv)
	}
	if rank != "" && size != "" {
		said.Launcher = ""
	}
	return &said
}

// hosts reports whether this process hosts the store.
func (m *meeting) hosts(o InitOptions) bool {
	return m.env.Rank == 0 && !m.env.AgentStore && !o.Join && (m.scheme == "tcp" || m.scheme == "env")
}

// orTwice returns the error for a rank 0 that could not host the store: why, or ErrDuplicateRank if another rank 0
// of the job hosts it. That one gets ErrDuplicateRank as well.
func (m *meeting) orTwice(ctx context.Context, o InitOptions, why error) error {
	if !m.hosts(o) || m.env.Size == 1 || !errors.Is(why, syscall.EADDRINUSE) {
		return why
	}
	ctx, cancel := cputime.WithTimeout(ctx, time.Second)
	defer cancel()
	st, err := tcp.New(ctx, m.addr, tcp.Options{TLS: o.TLS, Job: m.job})
	if err != nil {
		return why
	}
	defer st.Close()
	name := cmp.Or(o.Name, "0")
	err = meet.Twice(ctx, meet.Config{Store: store.Prefix("default_pg", st), Name: name, Rank: 0, Size: m.env.Size, Job: m.job})
	if err != nil {
		return fmt.Errorf("pg: group %q: %w", name, err)
	}
	return why
}

// open opens the store. Errors name it, and no password.
func (m *meeting) open(ctx context.Context, o InitOptions) (store.Store, error) {
	switch m.scheme {
	case "file":
		f, err := store.NewFile(m.path, m.env.Size)
		if err != nil {
			return nil, err
		}
		f.SetTimeout(o.Timeout)
		return f, nil
	case "tcp", "env":
	default:
		return m.opener(ctx, m.url, store.OpenOptions{Prefix: m.prefix, Timeout: o.Timeout, TLS: o.TLS})
	}
	listen := o.Listen
	if listen == "" {
		listen = launch.ListenAddr(m.addr)
	}
	devices, err := backend.ParseDevices(o.Backend)
	if err != nil {
		return nil, err
	}
	return tcp.New(ctx, m.addr, tcp.Options{
		Server:    m.hosts(o),
		Listen:    listen,
		WorldSize: m.env.Size,
		CountOnly: !o.apart(devices), // the meeting waits, and notices a rank that dies
		Once:      !m.env.AgentStore && !o.Join,
		Timeout:   o.Timeout,
		TLS:       o.TLS,
		Job:       m.job,

		Rank: m.env.Rank, HostedBy: m.hostedBy(), Logger: m.logger(o), ResolveTimeout: m.resolveTimeout, ServerOptions: o.StoreServer,
	})
}
