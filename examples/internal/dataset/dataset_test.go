package dataset

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
)

func TestDigits(t *testing.T) {
	d := must.Get(Digits())
	require.Equal(t, 1438, d.Train.Len())
	require.Equal(t, 359, d.HeldOut.Len())
	for _, s := range []Set{d.Train, d.HeldOut} {
		require.Len(t, s.Inputs, s.Len()*s.Features)
		var perClass [10]int
		for _, l := range s.Labels {
			perClass[l]++
		}
		for class, n := range perClass {
			require.Greater(t, n, s.Len()/20, "class %d", class)
		}
	}
	// The first and the fifth line of the file.
	require.Equal(t, []float32{0, 0, 5. / 16, 13. / 16, 9. / 16, 1. / 16}, d.Train.Inputs[:6])
	require.Equal(t, []uint8{0, 1, 2, 3, 5}, d.Train.Labels[:5])
	require.Equal(t, uint8(4), d.HeldOut.Labels[0])
}

func TestDigitsDamaged(t *testing.T) {
	pack := func(s string) []byte {
		var b bytes.Buffer
		z := gzip.NewWriter(&b)
		_, err := z.Write([]byte(s))
		require.NoError(t, err)
		require.NoError(t, z.Close())
		return b.Bytes()
	}
	row := string(bytes.Repeat([]byte("1,"), 64))
	for name, b := range map[string][]byte{
		"empty": nil, "not gzip": []byte("1,2,3"), "few images": pack(row + "3\n"), "short row": pack("1,2\n"),
		"pixel": pack("17," + row[2:] + "3\n"), "label": pack(row + "10\n"), "cut": digits[:len(digits)/2],
	} {
		_, err := parseDigits(b)
		require.Error(t, err, name)
	}
}

func TestGather(t *testing.T) {
	s := Set{Features: 2, Classes: 3, Inputs: []float32{0, 1, 10, 11, 20, 21}, Labels: []uint8{0, 1, 2}}
	x, y := s.Gather(make([]float32, 8), make([]uint8, 4), []int{2, 0})
	require.Equal(t, []float32{20, 21, 0, 1}, x)
	require.Equal(t, []uint8{2, 0}, y)
}

func idx(dims []uint32, data []byte) []byte {
	b := []byte{0, 0, 8, byte(len(dims))}
	for _, d := range dims {
		b = binary.BigEndian.AppendUint32(b, d)
	}
	return append(b, data...)
}

func zip(t testing.TB, b []byte) []byte {
	var out bytes.Buffer
	z := gzip.NewWriter(&out)
	_, err := z.Write(b)
	require.NoError(t, err)
	require.NoError(t, z.Close())
	return out.Bytes()
}

func TestLoadIDX(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, b []byte) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), b, 0o644))
	}
	write("train-images-idx3-ubyte.gz", zip(t, idx([]uint32{2, 1, 2}, []byte{0, 255, 51, 102})))
	write("train-labels-idx1-ubyte", idx([]uint32{2}, []byte{1, 0}))
	write("t10k-images-idx3-ubyte", idx([]uint32{1, 1, 2}, []byte{255, 0}))
	write("t10k-labels-idx1-ubyte.gz", zip(t, idx([]uint32{1}, []byte{2})))
	d, err := LoadIDX(dir)
	require.NoError(t, err)
	require.Equal(t, Set{Features: 2, Classes: 3, Inputs: []float32{0, 1, .2, .4}, Labels: []uint8{1, 0}}, d.Train)
	require.Equal(t, Set{Features: 2, Classes: 3, Inputs: []float32{1, 0}, Labels: []uint8{2}}, d.HeldOut)

	write("t10k-images-idx3-ubyte", idx([]uint32{1, 1, 1}, []byte{255}))
	_, err = LoadIDX(dir)
	require.ErrorContains(t, err, "training images have 2 pixels, held-out images 1")

	write("train-labels-idx1-ubyte", idx([]uint32{3}, []byte{1, 0, 1}))
	_, err = LoadIDX(dir)
	require.ErrorContains(t, err, "part train: 2 images but 3 labels")

	_, err = LoadIDX(t.TempDir())
	require.ErrorIs(t, err, os.ErrNotExist)
	require.ErrorContains(t, err, "train-images-idx3-ubyte.gz")
}

func TestParseIDXRefuses(t *testing.T) {
	for _, c := range []struct {
		name string
		file []byte
		dims int
		want string
	}{
		{"empty", nil, 1, "header"},
		{"cut header", idx([]uint32{1}, nil)[:6], 1, "header"},
		{"other type", append([]byte{0, 0, 13, 1}, 0, 0, 0, 0), 1, "begins with"},
		{"other rank", idx([]uint32{1, 1, 1}, []byte{1}), 1, "begins with"},
		{"too few", idx([]uint32{3}, []byte{1}), 1, "promise 3 elements, the file has 1"},
		{"too many", idx([]uint32{1}, []byte{1, 2}), 1, "the file has more"},
		{"wide", idx([]uint32{1, 1, 1 << 13}, nil), 3, "dimension 2 is 8192"},
		{"huge", idx([]uint32{1 << 31, 1 << 12, 1 << 12}, nil), 3, "promise more than"},
		{"overflow", idx([]uint32{1 << 31}, nil), 1, "promise more than"},
		{"lies", idx([]uint32{1 << 30}, []byte{1}), 1, "the file has 1"},
		{"bad gzip", append([]byte{0x1f, 0x8b}, make([]byte, 20)...), 1, "gzip"},
		{"cut gzip", zip(t, idx([]uint32{100}, make([]byte, 100)))[:30], 1, "EOF"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := parseIDX(bytes.NewReader(c.file), c.dims)
			require.ErrorIs(t, err, ErrFormat)
			require.ErrorContains(t, err, c.want)
		})
	}
}

func FuzzParseIDX(f *testing.F) {
	f.Add(idx([]uint32{2, 1, 2}, []byte{0, 255, 51, 102}), uint8(3))
	f.Add(idx([]uint32{2}, []byte{1, 0}), uint8(1))
	f.Add(zip(f, idx([]uint32{2}, []byte{1, 0})), uint8(1))
	f.Add(idx([]uint32{1 << 31, 1, 1}, nil), uint8(3))
	f.Fuzz(func(t *testing.T, b []byte, dims uint8) {
		a, err := parseIDX(bytes.NewReader(b), int(dims%4))
		if err != nil {
			require.ErrorIs(t, err, ErrFormat)
			return
		}
		size := 1
		for _, d := range a.dims {
			size *= d
		}
		require.Len(t, a.data, size)
	})
}

// TestFashionMNIST reads the real files where Debian's dataset-fashion-mnist is installed.
func TestFashionMNIST(t *testing.T) {
	const dir = "/usr/share/datasets/fashion-mnist"
	if _, err := os.Stat(dir); err != nil {
		if os.Getenv("C10D_REQUIRE_SERVICES") == "1" {
			t.Fatal(err)
		}
		t.Skipf("Debian's dataset-fashion-mnist is not installed: %v", err)
	}
	d := must.Get(LoadIDX(dir))
	require.Equal(t, []int{60000, 784, 10, 10000}, []int{d.Train.Len(), d.Train.Features, d.Train.Classes, d.HeldOut.Len()})
	require.Equal(t, "fashion-mnist", d.Name)
}
