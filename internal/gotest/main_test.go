package main

import (
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// recorded is what go test -json says, shortened, about a package with a test
// of each kind, one that does not compile and one whose test ends the process.
const recorded = `{"Action":"start","Package":"a"}
{"Action":"output","Package":"a","Test":"TestGood","Output":"=== RUN   TestGood\n"}
{"Action":"output","Package":"a","Test":"TestGood","Output":"    a_test.go:3: said by a test that passed\n"}
{"Action":"output","Package":"a","Test":"TestGood","Output":"--- PASS: TestGood (0.00s)\n"}
{"Action":"pass","Package":"a","Test":"TestGood","Elapsed":0}
{"Action":"output","Package":"a","Test":"TestRedis","Output":"=== RUN   TestRedis\n"}
{"Action":"output","Package":"a","Test":"TestRedis","Output":"    a_test.go:5: no redis-server\n"}
{"Action":"output","Package":"a","Test":"TestRedis","Output":"--- SKIP: TestRedis (0.00s)\n"}
{"Action":"skip","Package":"a","Test":"TestRedis","Elapsed":0}
{"Action":"output","Package":"a","Test":"TestRedis/sub","Output":"    a_test.go:9: no redis-server\n"}
{"Action":"skip","Package":"a","Test":"TestRedis/sub","Elapsed":0}
{"Action":"output","Package":"a","Test":"TestTorch","Output":"    a_test.go:7: no PyTorch\n"}
{"Action":"skip","Package":"a","Test":"TestTorch","Elapsed":0}
{"Action":"output","Package":"a","Test":"TestBad","Output":"    a_test.go:4: wrong\n"}
{"Action":"output","Package":"a","Test":"TestBad","Output":"--- FAIL: TestBad (0.00s)\n"}
{"Action":"fail","Package":"a","Test":"TestBad","Elapsed":0}
{"Action":"output","Package":"a","Output":"FAIL\n"}
{"Action":"output","Package":"a","Output":"FAIL\ta\t0.012s\n"}
{"Action":"fail","Package":"a","Elapsed":0.012}
{"ImportPath":"b","Action":"build-output","Output":"b/b.go:1:1: undefined: x\n"}
{"ImportPath":"b","Action":"build-fail"}
{"Action":"output","Package":"c","Test":"TestExit","Output":"panic: at the disco\n"}
{"Action":"output","Package":"c","Output":"FAIL\tc\t0.001s\n"}
{"Action":"fail","Package":"c","Elapsed":0.001}
{"Action":"output","Package":"d","Output":"PASS\n"}
{"Action":"output","Package":"d","Output":"ok  \td\t0.001s\n"}
{"Action":"pass","Package":"d","Elapsed":0.001}
{"Action":"output","Package":"e","Output":"?   \te\t[no test files]\n"}
{"Action":"skip","Package":"e","Elapsed":0}
no json
`

const shown = `    a_test.go:4: wrong
--- FAIL: TestBad (0.00s)
FAIL
FAIL	a	0.012s
b/b.go:1:1: undefined: x
FAIL	c	0.001s
panic: at the disco
ok  	d	0.001s
?   	e	[no test files]
no json

skipped 3 tests:
  a: no PyTorch (TestTorch)
  a: no redis-server (TestRedis and 1 more)
`

func TestShow(t *testing.T) {
	var w strings.Builder
	skips, err := show(&w, strings.NewReader(recorded))
	require.NoError(t, err)
	summarize(&w, skips)
	require.Equal(t, shown, w.String())
}

func TestNothingSkipped(t *testing.T) {
	var w strings.Builder
	summarize(&w, nil)
	require.Empty(t, w.String())
}

func TestForbidden(t *testing.T) {
	skips := []skip{{"a", "TestGPU", "no usable device: x"}}
	require.True(t, forbidden(skips, nil))
	require.False(t, forbidden(nil, nil))
	except := regexp.MustCompile("no.usable.device")
	require.False(t, forbidden(skips, except))
	require.True(t, forbidden(append(skips, skip{"a", "TestTorch", "no PyTorch"}), except))
}
