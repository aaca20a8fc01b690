//go:build unix

package agent

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/credentials"
)

// TestOwnSecrets: a job with TLS and no files has a secret and a token, for this user only. A token that
// is given counts.
func TestOwnSecrets(t *testing.T) {
	j := sh(2, `ls -l "$C10D_TLS_SECRET" "$C10D_TOKEN_FILE" | cut -c 1-10; basename "$C10D_TOKEN_FILE"`)
	j.TLS = true
	s, out, errs := run(t, j)
	require.True(t, s.OK, errs)
	for _, rank := range []string{"[rank0] ", "[rank1] "} {
		require.Regexp(t, `(?s)\Q`+rank+`\E-rw-------\n.*\Q`+rank+`\E-rw-------\n.*\Q`+rank+`\Estore-token\n`, out)
	}
	j.Secrets.Token = t.TempDir() + "/mine"
	require.NoError(t, credentials.WriteSecret(j.Secrets.Token))
	s, out, errs = run(t, j)
	require.True(t, s.OK, errs)
	require.Contains(t, out, "[rank0] mine\n")
}
