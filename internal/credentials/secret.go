package credentials

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
)

// readSecret reads the file of a secret. No error repeats a part of it. A file that other users can
// read is refused.
func readSecret(path string) ([]byte, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	if err := private(info); err != nil {
		return nil, fmt.Errorf("%s %w", path, err)
	}
	text, err := io.ReadAll(io.LimitReader(file, maxSecret+1))
	if err != nil {
		return nil, err
	}
	secret := bytes.TrimSpace(text)
	if len(secret) < minSecret || len(text) > maxSecret {
		return nil, fmt.Errorf("%s has a secret of %d bytes, want %d to %d that nobody can guess: make one with c10d certs -secret FILE", path, len(secret), minSecret, maxSecret)
	}
	return secret, nil
}

// WriteSecret makes a file with a new secret, which only this user can read. The file must not exist.
func WriteSecret(path string) error {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = io.WriteString(file, rand.Text()+rand.Text()+"\n")
	return errors.Join(err, file.Close())
}
