//go:build unix

package agent

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestOwnSecrets: a job with TLS and no files has a secret, for this user only.
func TestOwnSecrets(t *testing.T) {
	j := sh(2, `ls -l "$C10D_TLS_SECRET" | cut -c 1-10`)
	j.TLS = true
	s, out, errs := run(t, j)
	require.True(t, s.OK, errs)
	for _, rank := range []string{"[rank0] ", "[rank1] "} {
		require.Contains(t, out, rank+"-rw-------\n")
	}
}
