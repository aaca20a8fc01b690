package gloo_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/store/tcp"
)

const starvingVariable = "C10D_TEST_STARVING"

// starving is a rank in a process of its own, which the test starts. It may open a few more files
// when the group is made.
type starving struct {
	Store      string
	Prefix     string
	Rank, Size int
	Wire       gloo.Wire
	Files      int // how many
}

func init() {
	if text := os.Getenv(starvingVariable); text != "" {
		var s starving
		if err := json.Unmarshal([]byte(text), &s); err != nil {
			fmt.Println(err)
		} else {
			fmt.Println("ended:", s.live())
		}
		os.Exit(0)
	}
}

func (s *starving) live() error {
	st, err := tcp.New(context.Background(), s.Store, tcp.Options{})
	if err != nil {
		return err
	}
	defer st.Close()
	if _, err := st.Add(context.Background(), s.Prefix+"/starving", 1); err != nil {
		return err
	}
	open, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return err
	}
	var lim syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &lim); err != nil {
		return err
	}
	lim.Cur = uint64(len(open) - 1 + s.Files)
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &lim); err != nil {
		return err
	}
	b, err := gloo.New(context.Background(), backend.Options{
		Store: store.Prefix(s.Prefix, st), Rank: s.Rank, Size: s.Size, Timeout: time.Minute, Dialect: store.DialectV2, Specific: gloo.Options{Wire: s.Wire},
	})
	if err == nil {
		b.Close()
	}
	return err
}

// A process without enough descriptors says so at once, wherever it meets the limit, and does not
// blame another rank.
func TestNoDescriptorLeft(t *testing.T) {
	server, err := tcp.Listen(t.Context(), "127.0.0.1:0", tcp.ServerOptions{})
	require.NoError(t, err)
	defer server.Close()
	st, err := tcp.New(t.Context(), server.Addr().String(), tcp.Options{})
	require.NoError(t, err)
	defer st.Close()
	exe, err := os.Executable()
	require.NoError(t, err)
	const size = 4
	for _, wire := range []gloo.Wire{gloo.WireTCP, gloo.WireNative, gloo.WireGloo} {
		for _, rank := range []int{0, size - 1} {
			succeeded := false
			for files := 0; !succeeded; files++ {
				require.Less(t, files, 40)
				s := starving{Store: server.Addr().String(), Prefix: fmt.Sprintf("%s/%d/%d", wire, rank, files), Rank: rank, Size: size, Wire: wire, Files: files}
				text, err := json.Marshal(s)
				require.NoError(t, err)
				cmd := exec.Command(exe)
				cmd.Env = append(os.Environ(), starvingVariable+"="+string(text))
				out, err := cmd.StdoutPipe()
				require.NoError(t, err)
				require.NoError(t, cmd.Start())
				ctx, cancel := context.WithCancel(t.Context())
				var others sync.WaitGroup
				for r := range size {
					if r != rank {
						others.Go(func() {
							b, err := gloo.New(ctx, backend.Options{
								Store: store.Prefix(s.Prefix, st), Rank: r, Size: size, Timeout: time.Minute, Dialect: store.DialectV2, Specific: gloo.Options{Wire: wire},
							})
							if err == nil {
								b.Close()
							}
						})
					}
				}
				begun := time.Now()
				said, err := bufio.NewReader(out).ReadString('\n')
				cancel()
				others.Wait()
				require.NoError(t, err)
				require.NoError(t, cmd.Wait())
				t.Logf("%s rank %d, %d files, %v: %s", wire, rank, files, time.Since(begun), said)
				if succeeded = said == "ended: <nil>\n"; !succeeded {
					require.Contains(t, said, "this process has no file descriptor left")
				}
				require.Less(t, time.Since(begun), 9*time.Second)
			}
		}
	}
}
