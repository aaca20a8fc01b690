package run_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/must"
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

func (s *starving) live() (err error) {
	defer must.Catch(&err)
	st := must.Get(tcp.New(context.Background(), s.Store))
	defer st.Close()
	must.Get(st.Add(context.Background(), s.Prefix+"/starving", 1))
	open := must.Get(os.ReadDir("/proc/self/fd"))
	var lim syscall.Rlimit
	must.Do(syscall.Getrlimit(syscall.RLIMIT_NOFILE, &lim))
	lim.Cur = uint64(len(open) - 1 + s.Files)
	must.Do(syscall.Setrlimit(syscall.RLIMIT_NOFILE, &lim))
	b, err := gloo.New(context.Background(), backend.Options{
		Store: store.Prefix(s.Prefix, st), Rank: s.Rank, Size: s.Size, Timeout: time.Minute, Specific: gloo.Options{Wire: s.Wire},
	})
	if err == nil {
		b.Close()
	}
	return err
}

// A process without enough descriptors says so at once, wherever it meets the limit, and does not
// blame another rank.
func TestNoDescriptorLeft(t *testing.T) {
	server := must.Get(tcp.Listen(t.Context(), "127.0.0.1:0"))
	defer server.Close()
	st := must.Get(tcp.New(t.Context(), server.Addr().String()))
	defer st.Close()
	exe := must.Get(os.Executable())
	const size = 4
	for _, wire := range []gloo.Wire{gloo.WireTCP, gloo.WireNative, gloo.WireGloo} {
		for _, rank := range []int{0, size - 1} {
			succeeded, joining := false, false
			for files := 0; !succeeded; files++ {
				require.Less(t, files, 40)
				s := starving{Store: server.Addr().String(), Prefix: fmt.Sprintf("%s/%d/%d", wire, rank, files), Rank: rank, Size: size, Wire: wire, Files: files}
				text := must.Get(json.Marshal(s))
				cmd := exec.Command(exe)
				cmd.Env = append(os.Environ(), starvingVariable+"="+string(text))
				out := must.Get(cmd.StdoutPipe())
				require.NoError(t, cmd.Start())
				ctx, cancel := context.WithCancel(t.Context())
				var others sync.WaitGroup
				for r := range size {
					if r != rank {
						others.Go(func() {
							b, err := gloo.New(ctx, backend.Options{
								Store: store.Prefix(s.Prefix, st), Rank: r, Size: size, Timeout: time.Minute, Specific: gloo.Options{Wire: wire},
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
					joining = joining || strings.Contains(said, "is not connected with rank")
				}
				require.Less(t, time.Since(begun), 9*time.Second)
			}
			require.True(t, joining || wire == gloo.WireGloo, "the mesh says which connection it is")
		}
	}
}
