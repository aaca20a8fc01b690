package openfiles

import (
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestExplain(t *testing.T) {
	for err, want := range map[error]string{
		&net.OpError{Op: "accept", Net: "tcp", Err: os.NewSyscallError("accept4", syscall.EMFILE)}: "ulimit -n 65536",
		fmt.Errorf("memfd_create: %w", syscall.ENFILE):                                             "fs.file-max",
	} {
		got := Explain(err)
		require.ErrorContains(t, got, want)
		require.ErrorContains(t, got, err.Error())
		require.ErrorIs(t, got, err)
		require.True(t, Exhausted(got))
		require.Equal(t, got, Explain(got))
		wrapped := fmt.Errorf("more: %w", got)
		require.Equal(t, wrapped, Explain(wrapped), "it is explained already")
	}
	for _, err := range []error{nil, errors.New("other"), syscall.ECONNREFUSED} {
		require.False(t, Exhausted(err))
		require.Equal(t, err, Explain(err))
	}
}
