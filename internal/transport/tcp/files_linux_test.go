package tcp

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// openFiles returns how many descriptors this process has.
func openFiles() int {
	all, _ := os.ReadDir("/proc/self/fd")
	return len(all) - 1 // without that of the directory
}

// A rank costs one descriptor for each peer, besides its listener and two for all of them.
func TestDescriptors(t *testing.T) {
	const size = 24
	before := openFiles()
	ms := join(t, size, polling())
	require.LessOrEqual(t, openFiles()-before, size*(size-1)+size*3)
	require.Greater(t, openFiles()-before, size*(size-1))
	for _, m := range ms {
		require.NoError(t, m.Close())
	}
	require.LessOrEqual(t, openFiles(), before)
}

const starvingRank = "C10D_TEST_TCP_STARVING"

func init() {
	if os.Getenv(starvingRank) != "" {
		fmt.Println(starve(os.Stdin, os.Stdout))
		os.Exit(0)
	}
}

// starve is a rank of a process that may open two more files when it joins.
func starve(in io.Reader, out io.Writer) error {
	var rank int
	fmt.Sscan(os.Getenv(starvingRank), &rank)
	e, err := Listen(local)
	if err != nil {
		return err
	}
	fmt.Fprintln(out, e.Addr())
	var addrs []string
	if err := json.NewDecoder(in).Decode(&addrs); err != nil {
		return err
	}
	var lim syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &lim); err != nil {
		return err
	}
	lim.Cur = uint64(openFiles() + 2)
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &lim); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	m, err := e.Join(ctx, rank, addrs)
	if err == nil {
		m.Close()
	}
	return err
}

// A rank that has no descriptor left for a connection says so at once, whether it connects or
// accepts, and says what to do.
func TestNoDescriptorLeft(t *testing.T) {
	const size = 6
	for _, rank := range []int{0, size - 1} {
		t.Run(fmt.Sprintf("rank %d", rank), func(t *testing.T) {
			exe, err := os.Executable()
			require.NoError(t, err)
			cmd := exec.Command(exe)
			cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d", starvingRank, rank))
			in, err := cmd.StdinPipe()
			require.NoError(t, err)
			piped, err := cmd.StdoutPipe()
			require.NoError(t, err)
			require.NoError(t, cmd.Start())
			defer cmd.Wait()
			defer cmd.Process.Kill()
			out := bufio.NewReader(piped)

			es, addrs := make([]*Endpoint, size), make([]string, size)
			for r := range size {
				if r == rank {
					addrs[r], err = out.ReadString('\n')
					addrs[r] = strings.TrimSpace(addrs[r])
				} else if es[r], err = Listen(local); err == nil {
					addrs[r] = es[r].Addr()
				}
				require.NoError(t, err)
			}
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			var others sync.WaitGroup
			for r, e := range es {
				if r != rank {
					others.Go(func() {
						if m, err := e.Join(ctx, r, addrs); err == nil {
							<-ctx.Done() // a connection that is closed would leave the starving rank its descriptor
							m.Close()
						}
					})
				}
			}
			begun := time.Now()
			require.NoError(t, json.NewEncoder(in).Encode(addrs))
			said, err := out.ReadString('\n')
			require.NoError(t, err)
			require.Regexp(t, `tcp: rank \d of 6 is not connected with rank \d: .*this process has no file descriptor left \(it may have \d+\): raise the limit .*ulimit -n 65536.*too many open files`, said)
			require.Less(t, time.Since(begun), patience/2)
			cancel()
			others.Wait()
		})
	}
}
