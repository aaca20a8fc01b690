package credentials

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io"

	"github.com/c10d-go/c10d/internal/ownfile"
)

// Limits of a secret's and a token's length. Whoever has seen one handshake can try guesses without
// further connections, so both must be too long for that.
const minSecret, minToken, maxSecret = 32, 16, 4096

// readSecret reads a file with a secret or a token. No error repeats a part of it.
func readSecret(path, what string, least int) ([]byte, error) {
	text, _, err := ownfile.ReadTrusted(path, true)
	if err != nil {
		return nil, err
	}
	secret := bytes.TrimSpace(text)
	if len(secret) < least || len(text) > maxSecret {
		return nil, fmt.Errorf("%s has a %s of %d bytes, want %d to %d that nobody can guess: make one with c10d certs -secret FILE", path, what, len(secret), least, maxSecret)
	}
	return secret, nil
}

// WriteSecret makes a file with a new secret, which serves as a token, too. Only this user can read it.
// The file must not exist.
func WriteSecret(path string) error {
	if err := ownfile.CheckTrusted(path); err != nil {
		return err
	}
	file, err := ownfile.Create(path)
	if err != nil {
		return err
	}
	_, err = io.WriteString(file, rand.Text()+rand.Text()+"\n")
	return errors.Join(err, file.Close())
}
