package dataset

import (
	"bytes"
	"compress/gzip"
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
