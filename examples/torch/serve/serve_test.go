package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/c10d-go/c10d/internal/freeport"
	"github.com/c10d-go/c10d/tensor"
	"github.com/c10d-go/c10d/weights"
)

// patience bounds every wait of these tests. A process may take tens of seconds
// to import PyTorch.
const patience = 3 * time.Minute

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func shapes(sizes ...int) (ps []weights.Param) {
	for l := range len(sizes) - 1 {
		ps = append(ps, weights.Param{Name: fmt.Sprint(l, ".weight"), DType: tensor.Float32, Shape: []int{sizes[l+1], sizes[l]}},
			weights.Param{Name: fmt.Sprint(l, ".bias"), DType: tensor.Float32, Shape: []int{sizes[l+1]}})
	}
	return ps
}

func TestNetworkOf(t *testing.T) {
	n, err := networkOf(shapes(64, 32, 10))
	require.NoError(t, err)
	require.Equal(t, network{64, 32, 10}, n)
	require.Equal(t, 64*32+32+330, n.elements())

	huge := shapes(64, 10)
	huge[0].Shape[0], huge[1].Shape[0] = math.MaxInt, math.MaxInt
	negative := shapes(64, -1, 10)
	many := shapes(64, 1<<12, 1<<11, 1<<12, 10)
	wide, wrong := shapes(64, 10), shapes(64, 10)
	wide[1].DType = tensor.Float64
	wrong[0].Shape, wrong[1].Shape = []int{10}, []int{10}
	bias := shapes(64, 10)
	bias[1].Shape = []int{10, 64}
	for want, ps := range map[string][]weights.Param{
		"0 parameters are not":          nil,
		"1 parameters are not":          shapes(64, 10)[:1],
		`"0.weight" has shape [10 63]`:  shapes(63, 10),
		`"0.bias" has shape [10 64]`:    bias,
		`"0.weight" has shape [10]`:     wrong,
		"are float32 and float64":       wide,
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
	parameters := [][]float32{make([]float32, 64*16), make([]float32, 16), make([]float32, 16*10), make([]float32, 10)}
	for h := range 16 {
		parameters[0][64*h+h] = 1
	}
	for o := range 10 {
		parameters[2][16*o+o] = 3
	}
	parameters[3][9] = 0.5
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

// goTrainer publishes what a test says.
type goTrainer struct {
	*weights.Publisher
	t *testing.T
}

func newTrainer(t *testing.T, address string) *goTrainer {
	t.Helper()
	p, err := weights.Listen(t.Context(), address)
	require.NoError(t, err)
	t.Cleanup(func() { p.Close() })
	return &goTrainer{p, t}
}

// publish returns the report of an update: process 3, epoch 2 and an accuracy of 0.5. The layer has this weight for the
// second pixel and digit 7, and biases 0.
func (g *goTrainer) publish(version uint64, weight float32) weights.Report {
	g.t.Helper()
	w, err := tensor.New(tensor.Float32, 10, 64)
	require.NoError(g.t, err)
	require.NoError(g.t, w.SetFloat64(float64(weight), 7, 1))
	b, err := tensor.New(tensor.Float32, 10)
	require.NoError(g.t, err)
	numbers, err := tensor.Of([]int64{3, 2, 500_000, time.Now().UnixMilli()}, aboutLen)
	require.NoError(g.t, err)
	return g.publishThese(version, weights.Named{Name: "w", Tensor: w}, weights.Named{Name: "b", Tensor: b}, weights.Named{Name: about, Tensor: numbers})
}

func (g *goTrainer) publishThese(version uint64, params ...weights.Named) weights.Report {
	g.t.Helper()
	ctx, cancel := context.WithTimeout(g.t.Context(), patience)
	defer cancel()
	require.NoError(g.t, g.Await(ctx, 1))
	report, err := g.Publish(ctx, version, params)
	require.NoError(g.t, err)
	return report
}

// start runs a service until the test ends or stop is called.
func start(t *testing.T, trainer string) (s *service, stop func()) {
	t.Helper()
	s, err := listen(t.Context(), config{http: "127.0.0.1:0", trainer: trainer, timeout: patience})
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

func (s *service) awaitState(t *testing.T, state string) overview {
	t.Helper()
	return s.await(t, state, func(o overview) bool { return o.Trainer.State == state })
}

func TestWeb(t *testing.T) {
	g := newTrainer(t, "127.0.0.1:0")
	s, err := listen(t.Context(), config{http: "127.0.0.1:0", trainer: g.Addr(), timeout: patience})
	require.NoError(t, err)
	defer s.listener.Close()
	defer s.web.receiver.Close()
	h := s.web.handler()
	call := func(method, path, body string) *httptest.ResponseRecorder {
		rec := httptest.NewRecorder()
		h.ServeHTTP(rec, httptest.NewRequest(method, path, strings.NewReader(body)))
		return rec
	}
	row := "[0,1,2,3,4,5,6,16]"
	image := func(rows ...string) string { return `{"image":[` + strings.Join(rows, ",") + `]}` }
	good := image(row, row, row, row, row, row, row, row)

	require.Equal(t, 503, call("POST", "/predict", good).Code)
	require.Contains(t, call("GET", "/version", "").Body.String(), `"set":null`)

	g.publish(9, 0)
	require.Equal(t, 1, g.publish(10, 100).Receivers)
	answer := call("POST", "/predict", good)
	require.Equal(t, 200, answer.Code)
	var p prediction
	require.NoError(t, json.Unmarshal(answer.Body.Bytes(), &p))
	require.Equal(t, 7, p.Digit)
	require.EqualValues(t, 10, p.Set.Version)

	var o overview
	require.NoError(t, json.Unmarshal(call("GET", "/version", "").Body.Bytes(), &o))
	require.Equal(t, 650, o.Set.Parameters)
	require.Equal(t, 0.5, o.Set.Accuracy)
	require.EqualValues(t, 3, o.Set.Trainer)
	require.EqualValues(t, 2, o.Set.Epoch)
	require.EqualValues(t, 2, o.Sets)
	require.Equal(t, "connected", o.Trainer.State)

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

	g.publish(11, float32(math.NaN()))
	answer = call("POST", "/predict", good)
	require.Equal(t, 500, answer.Code)
	require.Contains(t, answer.Body.String(), "unsupported value")
}

// The header of a request is bounded as its body is.
func TestLongHeader(t *testing.T) {
	s, stop := start(t, newTrainer(t, "127.0.0.1:0").Addr())
	defer stop()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+s.listener.Addr().String()+"/", nil)
	require.NoError(t, err)
	r.Header.Set("Long", strings.Repeat("x", 32<<10))
	answer, err := client.Do(r)
	require.NoError(t, err)
	require.NoError(t, answer.Body.Close())
	require.Equal(t, http.StatusRequestHeaderFieldsTooLarge, answer.StatusCode)
}

// TestTrainers: a trainer whose model is another one, one that vanishes, and the next.
func TestTrainers(t *testing.T) {
	address := freeport.Loopback(t)
	g := newTrainer(t, address)
	s, _ := start(t, address)
	x, err := tensor.New(tensor.Float32, 3)
	require.NoError(t, err)
	numbers, err := tensor.New(tensor.Int64, aboutLen)
	require.NoError(t, err)
	refused := func(want string, params ...weights.Named) {
		t.Helper()
		require.Eventually(t, func() bool { // it may connect again and refuse the last parameters in between
			return strings.Contains(fmt.Sprint(g.publishThese(uint64(time.Now().UnixNano()), params...).Dropped), want)
		}, patience, time.Millisecond)
		o := s.await(t, want, func(o overview) bool { return strings.Contains(o.Trainer.Error, want) })
		require.Nil(t, o.Set)
	}
	refused(`the last parameter must be "about", 4 int64`, weights.Named{Name: "w", Tensor: x})
	refused("has shape [3]", weights.Named{Name: "w", Tensor: x}, weights.Named{Name: "b", Tensor: x}, weights.Named{Name: about, Tensor: numbers})
	require.NoError(t, g.Close())
	require.Equal(t, "waiting", s.await(t, "end", func(o overview) bool { return o.Trainer.State != "connected" }).Trainer.State)

	g = newTrainer(t, address)
	require.Equal(t, 1, g.publish(5, 1).Receivers)
	require.NoError(t, g.Close())
	o := s.awaitState(t, "lost")
	require.NotEmpty(t, o.Trainer.Error)
	require.EqualValues(t, 5, o.Set.Version)
	g = newTrainer(t, address)
	require.Equal(t, 1, g.publish(2, 1).Receivers)
	o = s.awaitState(t, "connected")
	require.EqualValues(t, 2, o.Set.Version, "a trainer that went on from its checkpoint")
}

func TestListenRefuses(t *testing.T) {
	_, err := listen(t.Context(), config{http: "127.0.0.1:0", trainer: "nowhere"})
	require.ErrorContains(t, err, "missing port")
	_, err = listen(t.Context(), config{http: "127.0.0.1:x", trainer: "127.0.0.1:1"})
	require.ErrorContains(t, err, "serve: ")
}
