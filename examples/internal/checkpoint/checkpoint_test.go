package checkpoint

import (
	"crypto/sha256"
	"encoding/binary"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

type meta struct {
	Epoch int
	Sizes []int
}

func TestRoundTrip(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ckpt")
	for _, slices := range [][][]float32{
		{{1, -2, float32(math.Inf(1))}, {}, {math.SmallestNonzeroFloat32}},
		{}, // written over the first one
	} {
		want := meta{Epoch: 3, Sizes: []int{4, 2}}
		require.NoError(t, Write(path, want, slices))
		var got meta
		read, err := Read(path, &got)
		require.NoError(t, err)
		require.Equal(t, want, got)
		require.Equal(t, slices, read)
	}
	left, err := os.ReadDir(filepath.Dir(path))
	require.NoError(t, err)
	require.Len(t, left, 1, "temporary files are left")
}

func TestFailedWriteKeepsOld(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ckpt")
	require.NoError(t, Write(path, meta{Epoch: 1}, nil))
	require.Error(t, Write(path, func() {}, nil), "a function has no JSON")
	require.Error(t, Write(filepath.Join(path, "below"), meta{}, nil), "not a folder")
	var got meta
	_, err := Read(path, &got)
	require.NoError(t, err)
	require.Equal(t, 1, got.Epoch)
}

// TestDamage cuts a checkpoint at every place and flips every byte of it.
func TestDamage(t *testing.T) {
	good, err := encode(meta{Epoch: 3}, [][]float32{{1, 2}, {3}})
	require.NoError(t, err)
	for n := range good {
		_, err := decode(good[:n], &meta{})
		require.ErrorIs(t, err, ErrDamaged, "cut to %d bytes", n)
		bad := append([]byte(nil), good...)
		bad[n] ^= 0x10
		_, err = decode(bad, &meta{})
		if n >= len(magic) && n < len(magic)+4 {
			require.ErrorIs(t, err, ErrVersion)
		} else {
			require.ErrorIs(t, err, ErrDamaged, "byte %d flipped", n)
		}
	}
	_, err = Read(filepath.Join(t.TempDir(), "none"), &meta{})
	require.ErrorIs(t, err, os.ErrNotExist)
}

// FuzzDecode gives arbitrary contents a correct frame and checksum.
func FuzzDecode(f *testing.F) {
	good, err := encode(meta{Epoch: 3}, [][]float32{{1, 2}, {3}})
	require.NoError(f, err)
	f.Add(good[len(magic)+4 : len(good)-sha256.Size])
	f.Add(binary.LittleEndian.AppendUint32(nil, 1<<31))
	f.Add([]byte("\x02\x00\x00\x00{}\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"))
	f.Fuzz(func(t *testing.T, body []byte) {
		b := binary.LittleEndian.AppendUint32([]byte(magic), version)
		b = append(b, body...)
		sum := sha256.Sum256(b)
		var m meta
		slices, err := decode(append(b, sum[:]...), &m)
		if err != nil {
			require.ErrorIs(t, err, ErrDamaged)
			return
		}
		_, err = encode(m, slices)
		require.NoError(t, err)
	})
}
