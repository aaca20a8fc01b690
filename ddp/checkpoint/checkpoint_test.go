package checkpoint

import (
	"bytes"
	"crypto/sha256"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
)

type meta struct {
	Epoch int
	Sizes []int
}

func TestRoundTrip(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ckpt")
	for _, slices := range [][][]float32{
		{{1, -2, float32(math.Inf(1))}, {math.SmallestNonzeroFloat32}},
		nil, // written over the first one
	} {
		want := meta{Epoch: 3, Sizes: []int{4, 2}}
		require.NoError(t, Save(path, want, slices))
		var got meta
		read := must.Get(Load(path, &got))
		require.Equal(t, want, got)
		require.Equal(t, slices, read)
	}
	left := must.Get(os.ReadDir(filepath.Dir(path)))
	require.Len(t, left, 1, "temporary files are left")
}

func TestFailedWriteKeepsOld(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ckpt")
	require.NoError(t, Save(path, meta{Epoch: 1}, nil))
	require.Error(t, Save(path, func() {}, nil), "a function has no encoding")
	require.Error(t, Save(filepath.Join(path, "below"), meta{}, nil), "not a folder")
	var got meta
	_, err := Load(path, &got)
	require.NoError(t, err)
	require.Equal(t, 1, got.Epoch)
}

// TestDamage cuts a checkpoint at every place and flips every byte of it.
func TestDamage(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ckpt")
	require.NoError(t, Save(path, meta{Epoch: 3}, [][]float32{{1, 2}, {3}}))
	good, err := os.ReadFile(path)
	require.NoError(t, err)
	damaged := func(b []byte) {
		t.Helper()
		require.NoError(t, os.WriteFile(path, b, 0o644))
		_, err := Load(path, &meta{})
		require.ErrorIs(t, err, ErrDamaged)
	}
	for n := range good {
		damaged(good[:n])
		bad := bytes.Clone(good)
		bad[n] ^= 0x10
		damaged(bad)
	}
	for _, body := range []string{"", "no gob", string(good[sha256.Size : len(good)-1])} {
		sum := sha256.Sum256([]byte(body))
		damaged(append(sum[:], body...))
	}
	_, err = Load(filepath.Join(t.TempDir(), "none"), &meta{})
	require.ErrorIs(t, err, os.ErrNotExist)
}
