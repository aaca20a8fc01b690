package pg

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/freeport"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/internal/testsize"
)

// A full run:
//
//	go test ./pg -run TestCrowd -crowd 256 -crowd.tries 10 -timeout 2h
var (
	crowd      = flag.Int("crowd", crowdSize(), "`ranks` of TestCrowd, each a process")
	crowdTries = flag.Int("crowd.tries", 1, "`n` groups of TestCrowd for each wire")
)

// crowdSize is 256 in make nightly. It is called before the flags are parsed.
func crowdSize() int {
	if testsize.Long() {
		return 256
	}
	return 16
}

const (
	crowdURL = "C10D_TEST_CROWD_URL"

	// crowdLimit is the ranks' timeout.
	crowdLimit = 5 * time.Minute
)

func init() {
	if url := os.Getenv(crowdURL); url != "" {
		if err := crowdRank(url); err != nil {
			fmt.Println(err)
		}
		os.Exit(0)
	}
}

// crowdRank makes the default group, gathers all ranks' numbers and closes the group.
func crowdRank(url string) (err error) {
	defer must.Catch(&err)
	rank, _ := strconv.Atoi(os.Getenv("RANK"))
	size, _ := strconv.Atoi(os.Getenv("WORLD_SIZE"))
	begun := time.Now()
	o := InitOptions{Rank: rank, Size: size, Options: Options{Timeout: crowdLimit}}
	g := must.Get(initFrom(context.Background(), url, o, func(string) string { return "" }))
	if rank == 0 {
		fmt.Fprintf(os.Stderr, "made after %v\n", time.Since(begun).Round(time.Millisecond))
	}
	all := make([]int64, size)
	err = Wait(g.AllGatherIntoTensor(context.Background(), Slice(all), Slice([]int64{int64(rank)})))
	for i, r := range all {
		if err == nil && r != int64(i) {
			err = fmt.Errorf("rank %d has %d in place %d", rank, r, i)
		}
	}
	if closed := g.Close(); err == nil {
		err = closed
	}
	return err
}

// TestCrowd has many processes gather and close their group at once, with fewer CPUs than ranks. A
// rank that leaves early must not make the others fail.
func TestCrowd(t *testing.T) {
	t.Parallel()
	exe := must.Get(os.Executable())
	for i := range *crowdTries {
		for _, wire := range []string{"native", "tcp", "gloo"} {
			t.Run(fmt.Sprint(wire, i), func(t *testing.T) {
				url := "tcp://" + freeport.Loopback(t)
				ctx, cancel := context.WithTimeout(t.Context(), 2*crowdLimit)
				defer cancel()
				begun := time.Now()
				ranks, says := make([]*exec.Cmd, *crowd), make([]bytes.Buffer, *crowd)
				var log bytes.Buffer
				for r := range ranks {
					cmd := exec.CommandContext(ctx, exe)
					cmd.Env = append(os.Environ(), crowdURL+"="+url, "RANK="+strconv.Itoa(r), "WORLD_SIZE="+strconv.Itoa(*crowd), "C10D_WIRE="+wire)
					cmd.Stdout = &says[r]
					if r == 0 {
						cmd.Stderr = &log
					}
					require.NoError(t, cmd.Start())
					ranks[r] = cmd
				}
				for _, cmd := range ranks {
					if err := cmd.Wait(); err != nil {
						t.Error(err)
					}
				}
				var failed []int
				for r := range ranks {
					if says[r].Len() > 0 {
						failed = append(failed, r)
					}
				}
				// First those that do not only say what another rank has noticed.
				told := func(r int) int { return bytes.Count(says[r].Bytes(), []byte("(noticed by")) }
				slices.SortStableFunc(failed, func(a, b int) int { return told(a) - told(b) })
				for _, r := range failed[:min(len(failed), 5)] {
					t.Errorf("rank %d: %s", r, says[r].String())
				}
				t.Logf("%d of %d ranks failed; %s; all over after %v", len(failed), *crowd, strings.TrimSpace(log.String()), time.Since(begun).Round(time.Millisecond))
			})
		}
	}
}
