package credentials_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/credentials"
	"github.com/c10d-go/c10d/internal/must"
)

// TestTokenIsHidden: structs with a token can be printed.
func TestTokenIsHidden(t *testing.T) {
	const secret = "hunter2-hunter2"
	type options struct{ Token credentials.Token }
	o := options{secret}
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d"} {
		for _, v := range []any{o, &o, o.Token, []credentials.Token{secret}, map[string]credentials.Token{"a": secret}} {
			text := fmt.Sprintf(verb, v)
			require.NotContains(t, text, secret)
			require.NotContains(t, text, fmt.Sprintf("%x", secret))
			require.NotContains(t, text, fmt.Sprintf("%X", secret))
			require.Contains(t, text, "[hidden]")
		}
	}
	require.Equal(t, "{}", fmt.Sprintf("%v", options{}))
	require.JSONEq(t, `{"Token": "[hidden]"}`, string(must.Get(json.Marshal(o))))
	var log bytes.Buffer
	for _, h := range []slog.Handler{slog.NewTextHandler(&log, nil), slog.NewJSONHandler(&log, nil)} {
		slog.New(h).Info("made", "token", o.Token, "options", o)
	}
	require.NotContains(t, log.String(), secret)
}
