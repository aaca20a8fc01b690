package callback

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
)

// A Match against queues in maps, step by step.
func TestMatchAgainstModel(t *testing.T) {
	rng := must.Rand(t)
	type value struct{ n, size int }
	m := Match[int, value, int]{Values: 20, Bytes: 1000}
	values, takers := map[int][]value{}, map[int][]int{}
	bytes, count, waiting := 0, 0, 0
	for i := range 100_000 {
		k := rng.IntN(5)
		switch rng.IntN(9) {
		case 0, 1, 2, 3:
			v := value{i, rng.IntN(120)}
			c, ok, err := m.Put(k, v, int64(v.size))
			switch {
			case len(takers[k]) > 0:
				require.NoError(t, err)
				require.True(t, ok)
				require.Equal(t, takers[k][0], c)
				takers[k] = takers[k][1:]
				waiting--
			case count == 20 || bytes+v.size > 1000:
				full := must.As[*FullError](t, err)
				require.Equal(t, FullError{count, 20, int64(bytes), 1000}, *full)
			default:
				require.NoError(t, err)
				require.False(t, ok)
				values[k] = append(values[k], v)
				count, bytes = count+1, bytes+v.size
			}
		case 4, 5, 6, 7:
			v, ok := m.Take(k, i)
			require.Equal(t, len(values[k]) > 0, ok)
			if ok {
				require.Equal(t, values[k][0], v)
				count, bytes = count-1, bytes-v.size
				values[k] = values[k][1:]
			} else {
				takers[k] = append(takers[k], i)
				waiting++
			}
		case 8:
			if rng.IntN(100) > 0 {
				continue
			}
			key := map[int]int{} // of each number
			for k := range 5 {
				for _, v := range values[k] {
					key[v.n] = k
				}
				for _, c := range takers[k] {
					key[c] = k
				}
			}
			m.Drop(func(v value) {
				k := key[v.n]
				require.Equal(t, values[k][0], v)
				values[k] = values[k][1:]
				count, bytes = count-1, bytes-v.size
			}, func(c int) {
				k := key[c]
				require.Equal(t, takers[k][0], c)
				takers[k] = takers[k][1:]
				waiting--
			})
			require.Zero(t, count+bytes+waiting)
		}
		a, b, c := m.Waiting()
		require.Equal(t, []int{count, bytes, waiting}, []int{a, int(b), c})
		v, ok := m.Value(k)
		require.Equal(t, len(values[k]) > 0, ok)
		if ok {
			require.Equal(t, values[k][0], v)
		}
		c, ok = m.Taker(k)
		require.Equal(t, len(takers[k]) > 0, ok)
		if ok {
			require.Equal(t, takers[k][0], c)
		}
	}
}

func TestMatchAllocatesNothing(t *testing.T) {
	m := Match[uint64, int, int]{Values: 100, Bytes: 100}
	k := uint64(0)
	round := func() {
		for range 4 {
			k++
			m.Put(k, 1, 1)
			m.Put(k, 2, 1)
			m.Take(k+1, 3)
			m.Take(k, 4)
			m.Take(k, 5)
			m.Put(k+1, 6, 1)
		}
	}
	for range 1000 {
		round()
	}
	require.Zero(t, testing.AllocsPerRun(1000, round))
	a, b, c := m.Waiting()
	require.Zero(t, a+int(b)+c)
}
