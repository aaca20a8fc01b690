package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/c10d-go/c10d/examples/internal/dataset"
	"github.com/c10d-go/c10d/pg"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/store/tcp"
	"github.com/c10d-go/c10d/tensor"
)

// patience bounds every wait of these tests. A process may take tens of seconds
// to import PyTorch.
const patience = 3 * time.Minute

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func shapes(sizes ...int) (ps []parameter) {
	for l := range len(sizes) - 1 {
		ps = append(ps, parameter{fmt.Sprint(l, ".weight"), []int{sizes[l+1], sizes[l]}}, parameter{fmt.Sprint(l, ".bias"), []int{sizes[l+1]}})
	}
	return ps
}

func TestNetworkOf(t *testing.T) {
	n, err := networkOf(shapes(64, 32, 10))
	require.NoError(t, err)
	require.Equal(t, network{64, 32, 10}, n)
	require.Equal(t, []int{64 * 32, 32, 320, 10}, n.lengths())
	require.Equal(t, 64*32+32+330, n.elements())

	huge := shapes(64, 10)
	huge[0].Shape[0], huge[1].Shape[0] = math.MaxInt, math.MaxInt
	negative := shapes(64, -1, 10)
	many := shapes(64, 1<<12, 1<<11, 1<<12, 10)
	for want, ps := range map[string][]parameter{
		"0 parameters are not":          nil,
		"1 parameters are not":          shapes(64, 10)[:1],
		`"0.weight" has shape [10 63]`:  shapes(63, 10),
		`"0.bias" has shape [10 64]`:    {{"0.weight", []int{10, 64}}, {"0.bias", []int{10, 64}}},
		`"0.weight" has shape [10]`:     {{"0.weight", []int{10}}, {"0.bias", []int{10}}},
		"9 outputs; 10 digits":          shapes(64, 9),
		"[9223372036854775807 64]":      huge,
		"outputs must be at least 1":    negative,
		"has more than 16777216 elemen": many,
	} {
		_, err := networkOf(ps)
		require.ErrorContains(t, err, want)
	}
}

func TestProbabilities(t *testing.T) {
	// Hidden neuron h sees pixel h; output o sees hidden neuron o, three times.
	n := network{64, 16, 10}
	parameters := make([]float32, n.elements())
	for h := range 16 {
		parameters[64*h+h] = 1
	}
	for o := range 10 {
		parameters[17*64-64+16+16*o+o] = 3
	}
	parameters[n.elements()-1] = 0.5 // the bias of digit 9
	image := make([]float32, 64)
	image[3], image[4], image[60] = 1, 0.5, 1
	var want [10]float64
	sum := 0.
	for d := range want {
		want[d] = math.Exp(3 * math.Tanh(float64(image[d])))
		if d == 9 {
			want[d] = math.Exp(0.5)
		}
		sum += want[d]
	}
	for d, p := range n.probabilities(parameters, image) {
		require.InDelta(t, want[d]/sum, p, 1e-6, d)
	}
}

func TestChecksum(t *testing.T) {
	// zlib.crc32(torch.arange(3000.).numpy().tobytes())
	v := make([]float32, 3000)
	for i := range v {
		v[i] = float32(i)
	}
	require.EqualValues(t, 0x20a3ae24, checksum(v))
	require.Zero(t, checksum(nil))
}

// TestNoTornSets has predictions run while sets come, some of which break off
// half-way. All elements of a set are its version, so that one which is not
// whole shows.
func TestNoTornSets(t *testing.T) {
	var w weights
	n := network{64, 32, 10}
	done := make(chan struct{})
	var readers sync.WaitGroup
	for range 4 {
		readers.Go(func() {
			last := int64(-1)
			for {
				select {
				case <-done:
					return
				default:
				}
				runtime.Gosched()
				s := w.current.Load()
				if s == nil {
					continue
				}
				if s.Version < last {
					t.Errorf("version %d after %d", s.Version, last)
				}
				last = s.Version
				for i, v := range s.parameters {
					if i%1000 == 0 {
						runtime.Gosched()
					}
					if v != float32(s.Version) {
						t.Errorf("element %d of version %d is %v", i, s.Version, v)
						return
					}
				}
			}
		})
	}
	broken := errors.New("broken off")
	const versions = 498
	for v := range int64(versions) {
		err := w.receive(n, func(parameters []float32) (label, error) {
			for i := range parameters {
				if v%3 == 1 && i == len(parameters)/2 {
					return label{Version: v}, broken
				}
				if i%1000 == 0 {
					runtime.Gosched()
				}
				parameters[i] = float32(v)
			}
			return label{Version: v}, nil
		})
		if v%3 == 1 {
			require.ErrorIs(t, err, broken)
		} else {
			require.NoError(t, err)
		}
	}
	close(done)
	readers.Wait()
	require.EqualValues(t, versions-versions/3, w.received.Load())
}

// TestPredictionsDoNotWait: while a set is on its way, the one before serves.
func TestPredictionsDoNotWait(t *testing.T) {
	var w weights
	fill := func(v int64) func([]float32) (label, error) {
		return func([]float32) (label, error) { return label{Version: v}, nil }
	}
	version := func() int64 { return w.current.Load().Version }
	for v := range int64(3) {
		require.NoError(t, w.receive(network{64, 10}, fill(v)))
		require.Equal(t, v, version())
		require.NoError(t, w.receive(network{64, int(v) + 2, 10}, func(p []float32) (label, error) {
			require.Equal(t, v, version())
			require.Len(t, p, network{64, int(v) + 2, 10}.elements())
			return label{Version: v}, nil
		}))
	}
}

func TestDialect(t *testing.T) {
	for version, want := range map[string]store.Dialect{
		"1.13.1": store.DialectV1, "1.13.0a0": store.DialectV1, "2.0.1": store.DialectV1, "2.2.0+cu121": store.DialectV2,
		"2.6.0+debian": store.DialectV2, "2.11.0": store.DialectV2, "3.0": store.DialectV2, "": 0, "two": 0, "2": 0, "0.4.1": 0,
	} {
		d, err := (&announcement{Torch: version}).dialect()
		require.Equal(t, want, d, version)
		require.Equal(t, want == 0, err != nil, version)
	}
}

// start runs a service until the test ends or stop is called.
func start(t *testing.T, storeAddr string) (s *service, stop func()) {
	t.Helper()
	t.Setenv("GLOO_SOCKET_IFNAME", "lo")
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	s, err := listen(t.Context(), config{http: "127.0.0.1:0", store: storeAddr, timeout: patience, log: log})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-done:
			require.NoError(t, err)
		case <-time.After(patience):
			t.Error("the service does not end")
		}
	})
	t.Cleanup(stop)
	return s, stop
}

var client = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: patience}

// ask sends a request and decodes the answer into v, unless v is nil.
func (s *service) ask(method, path string, body []byte, v any) (code int, text string, err error) {
	r, err := http.NewRequest(method, "http://"+s.listener.Addr().String()+path, bytes.NewReader(body))
	if err != nil {
		return 0, "", err
	}
	a, err := client.Do(r)
	if err != nil {
		return 0, "", err
	}
	defer a.Body.Close()
	b, err := io.ReadAll(a.Body)
	if err == nil && v != nil {
		err = json.Unmarshal(b, v)
	}
	return a.StatusCode, string(b), err
}

// await polls /version until it is as wanted.
func (s *service) await(t *testing.T, what string, wanted func(overview) bool) (o overview) {
	t.Helper()
	require.Eventually(t, func() bool {
		o = overview{}
		_, _, err := s.ask("GET", "/version", nil, &o)
		require.NoError(t, err)
		return wanted(o)
	}, patience, 10*time.Millisecond, what)
	return o
}

func (s *service) awaitState(t *testing.T, state string, number int) overview {
	t.Helper()
	return s.await(t, state, func(o overview) bool { return o.Trainer.State == state && o.Trainer.Number == number })
}

func TestWeb(t *testing.T) {
	data, err := dataset.Digits()
	require.NoError(t, err)
	w := web{weights: new(weights), images: &data.HeldOut, link: &link{status: status{State: "waiting"}}}
	h := w.handler()
	call := func(method, path, body string) *httptest.ResponseRecorder {
		rec := httptest.NewRecorder()
		h.ServeHTTP(rec, httptest.NewRequest(method, path, strings.NewReader(body)))
		return rec
	}
	row := "[0,1,2,3,4,5,6,16]"
	image := func(rows ...string) string { return `{"image":[` + strings.Join(rows, ",") + `]}` }
	good := image(row, row, row, row, row, row, row, row)

	require.Equal(t, 503, call("GET", "/healthz", "").Code)
	require.Equal(t, 503, call("POST", "/predict", good).Code)
	require.Contains(t, call("GET", "/version", "").Body.String(), `"set":null`)
	require.Equal(t, 409, call("POST", "/refresh", "").Code)

	n := network{64, 10}
	fill := func(v float32) func(p []float32) (label, error) {
		return func(p []float32) (label, error) { p[64*7] = v; return label{Trainer: 3, Version: 9}, nil }
	}
	require.NoError(t, w.weights.receive(n, fill(0)))
	require.NoError(t, w.weights.receive(n, func(p []float32) (label, error) {
		p[64*7+1] = 100 // the second pixel is for digit 7
		return label{Trainer: 3, Version: 10, Epoch: 2, Accuracy: 0.5}, nil
	}))
	require.Equal(t, 200, call("GET", "/healthz", "").Code)
	answer := call("POST", "/predict", good)
	require.Equal(t, 200, answer.Code)
	var p prediction
	require.NoError(t, json.Unmarshal(answer.Body.Bytes(), &p))
	require.Equal(t, 7, p.Digit)
	require.EqualValues(t, 10, p.Set.Version)

	var o overview
	require.NoError(t, json.Unmarshal(call("GET", "/version", "").Body.Bytes(), &o))
	require.EqualValues(t, 1, o.Predictions)
	require.Equal(t, 650, o.Set.Parameters)
	require.Equal(t, 0.5, o.Set.Accuracy)

	sample := call("GET", "/digit", "").Body.String()
	require.Equal(t, 200, call("POST", "/predict", sample).Code, sample)
	require.Contains(t, call("GET", "/", "").Body.String(), "<canvas")
	require.Equal(t, 404, call("GET", "/other", "").Code)
	require.Equal(t, 405, call("GET", "/predict", "").Code)
	for body, want := range map[string]string{
		"":                                   "EOF",
		"[]":                                 "cannot unmarshal",
		image(row):                           "the image has 1 rows, want 8",
		strings.Replace(good, row, "[1]", 1): "row 0 has 1 pixels",
		strings.Replace(good, "16", "17", 1): "pixel 7 of row 0 is 17",
		strings.Replace(good, "16", "-1", 1): "pixel 7 of row 0 is -1",
		strings.Repeat(" ", 1<<16) + good:    "too large",
	} {
		answer := call("POST", "/predict", body)
		require.Equal(t, 400, answer.Code)
		require.Contains(t, answer.Body.String(), want)
	}

	require.NoError(t, w.weights.receive(n, fill(float32(math.NaN()))))
	answer = call("POST", "/predict", image("[1,0,0,0,0,0,0,0]", row, row, row, row, row, row, row))
	require.Equal(t, 500, answer.Code)
	require.Contains(t, answer.Body.String(), "unsupported value")
}

func TestLatencies(t *testing.T) {
	var l latencies
	count, p50, p99 := l.figures()
	require.Equal(t, []float64{0, 0, 0}, []float64{float64(count), p50, p99})
	for i := range 5000 {
		l.add(time.Duration(i) * time.Millisecond) // the first 904 are forgotten
	}
	count, p50, p99 = l.figures()
	require.EqualValues(t, 5000, count)
	require.InDelta(t, 904+2047, p50, 1)
	require.InDelta(t, 904+4054, p99, 1)
}

// goTrainer is a trainer without PyTorch, which can do what one should not.
type goTrainer struct {
	t     *testing.T
	store *tcp.Store
	n     int64
	group *pg.ProcessGroup
}

// come announces a trainer and returns it with the server's answer.
func come(t *testing.T, s *service, announcement string) (*goTrainer, string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	st, err := tcp.New(ctx, s.store.Addr(), tcp.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { st.Close() })
	n, err := st.Add(ctx, keyTrainers, 1)
	require.NoError(t, err)
	require.NoError(t, st.Set(ctx, keyTrainer+strconv.FormatInt(n, 10), []byte(announcement)))
	answer, err := st.Get(ctx, keyAnswer+strconv.FormatInt(n, 10))
	require.NoError(t, err)
	return &goTrainer{t: t, store: st, n: n}, string(answer)
}

func (g *goTrainer) join() {
	g.t.Helper()
	p, err := pg.New(g.t.Context(), store.Prefix(keyGroup+strconv.FormatInt(g.n, 10), g.store), trainerRank, groupSize, pg.Options{
		Timeout: patience, Dialect: store.DialectV2,
	})
	require.NoError(g.t, err)
	g.group = p
	g.t.Cleanup(func() { p.Close() })
}

func send[T tensor.Element](g *goTrainer, v ...T) error {
	ctx, cancel := context.WithTimeout(g.t.Context(), patience)
	defer cancel()
	return pg.BroadcastSlice(ctx, g.group, v, trainerRank)
}

func (g *goTrainer) update(version int64, parameters []float32) {
	g.t.Helper()
	require.NoError(g.t, send(g, headerUpdate, version, 1, 500_000, int64(checksum(parameters))))
	require.NoError(g.t, send(g, parameters[:640]...))
	require.NoError(g.t, send(g, parameters[640:]...))
}

const announced = `{"torch":"2.6.0","parameters":[{"name":"w","shape":[10,64]},{"name":"b","shape":[10]}]}`

func TestTrainers(t *testing.T) {
	s, _ := start(t, "127.0.0.1:0")
	require.Equal(t, "waiting", s.await(t, "", func(o overview) bool { return o.Trainer.State != "" }).Trainer.State)
	parameters := make([]float32, 650)
	for i := range parameters {
		parameters[i] = float32(i)
	}

	for text, want := range map[string]string{
		`{"torch":"2.6.0","parameters":[]}`: "0 parameters are not the weights",
		`{`:                                 `"" is not a version of PyTorch`,
		`{"torch":"2.6.0","parameters":[{"shape":[3]},{"shape":[3]}]}`: "has shape [3]",
	} {
		g, answer := come(t, s, text)
		require.Contains(t, answer, want)
		require.Contains(t, s.awaitState(t, "lost", int(g.n)).Trainer.Error, want)
	}

	// One that does what it should.
	g, answer := come(t, s, announced)
	require.Equal(t, "ok", answer)
	g.join()
	g.update(1, parameters)
	parameters[649] = 1
	g.update(2, parameters)
	o := s.await(t, "version 2", func(o overview) bool { return o.Set != nil && o.Set.Version == 2 })
	require.EqualValues(t, 2, o.Sets)
	require.Equal(t, checksum(parameters), o.Set.CRC32)
	require.Equal(t, "connected", o.Trainer.State)
	require.NoError(t, send[int64](g, headerGoodbye, 0, 0, 0, 0))
	s.awaitState(t, "finished", int(g.n))

	// Parameters that are not what their header promised, and no header.
	whole := o.Set.label
	g, _ = come(t, s, announced)
	g.join()
	require.NoError(t, send[int64](g, headerUpdate, 3, 1, 0, 1))
	require.NoError(t, errors.Join(send(g, parameters[:640]...), send(g, parameters[640:]...)))
	o = s.awaitState(t, "lost", int(g.n))
	require.Contains(t, o.Trainer.Error, "version 3 of trainer")
	require.Equal(t, whole, o.Set.label)
	g, _ = come(t, s, announced)
	g.join()
	require.NoError(t, send[int64](g, 7, 0, 0, 0, 0))
	require.Contains(t, s.awaitState(t, "lost", int(g.n)).Trainer.Error, "a header of kind 7")

	// One that goes in the middle of a set.
	g, _ = come(t, s, announced)
	g.join()
	require.NoError(t, send[int64](g, headerUpdate, 4, 1, 0, 1))
	require.NoError(t, send(g, make([]float32, 640)...))
	g.group.Abort(errors.New("out of memory"))
	o = s.awaitState(t, "lost", int(g.n))
	require.Equal(t, whole, o.Set.label)

	// One that takes a number and is not heard of again; then one that falls
	// silent and is replaced.
	_, err := g.store.Add(t.Context(), keyTrainers, 1)
	require.NoError(t, err)
	silent, _ := come(t, s, announced)
	require.Equal(t, g.n+2, silent.n)
	silent.join()
	s.awaitState(t, "connected", int(silent.n))
	g, answer = come(t, s, announced)
	require.Equal(t, "ok", answer)
	g.join()
	g.update(5, parameters)
	o = s.await(t, "version 5", func(o overview) bool { return o.Set.Version == 5 })
	require.EqualValues(t, g.n, o.Set.Trainer)
	require.Error(t, send[int64](silent, headerGoodbye, 0, 0, 0, 0))

	// Asked for a set, a trainer sees the counter change.
	code, _, err := s.ask("POST", "/refresh", nil, nil)
	require.NoError(t, err)
	require.Equal(t, http.StatusAccepted, code)
	wanted, err := g.store.Add(t.Context(), keyWanted, 0)
	require.NoError(t, err)
	require.EqualValues(t, 1, wanted)

	// The service ends while one more trainer is yet to join.
	_, answer = come(t, s, announced)
	require.Equal(t, "ok", answer)
}

func TestListenRefuses(t *testing.T) {
	_, err := listen(t.Context(), config{http: "127.0.0.1:0", store: "127.0.0.1:x"})
	require.ErrorContains(t, err, "store: tcp 127.0.0.1:x")
	_, err = listen(t.Context(), config{http: "127.0.0.1:x", store: "127.0.0.1:0"})
	require.ErrorContains(t, err, "serve: ")
}
