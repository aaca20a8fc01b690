package credentials

import (
	"fmt"
	"io"
	"log/slog"
)

// Token is the secret of a debug page. It is not shown: fmt, slog and encoding/json write "[hidden]" in its place, and
// nothing for an empty one. Convert it to a string to use it.
type Token string

// LoadToken reads a token of 16 to 4096 bytes from a file. White space around it is ignored. No file means none.
func LoadToken(file string) (Token, error) {
	if file == "" {
		return "", nil
	}
	token, err := readSecret(file, "token", minToken)
	return Token(token), err
}

// CheckToken returns an error if a token is too short. An empty one means none.
func CheckToken(t Token) error {
	if n := len(t); n > 0 && n < minToken {
		return fmt.Errorf("the token has %d bytes, want at least %d that nobody can guess: make one with c10d certs -secret FILE", n, minToken)
	}
	return nil
}

// String returns "[hidden]", or "" for an empty token.
func (t Token) String() string {
	if t == "" {
		return ""
	}
	return "[hidden]"
}

// Format implements fmt.Formatter for all verbs, also those that would show the bytes.
func (t Token) Format(f fmt.State, verb rune) {
	if text := t.String(); verb == 'q' || f.Flag('#') {
		fmt.Fprintf(f, "%q", text)
	} else {
		_, _ = io.WriteString(f, text)
	}
}

// LogValue implements slog.LogValuer.
func (t Token) LogValue() slog.Value { return slog.StringValue(t.String()) }

// MarshalText implements encoding.TextMarshaler.
func (t Token) MarshalText() ([]byte, error) { return []byte(t.String()), nil }
