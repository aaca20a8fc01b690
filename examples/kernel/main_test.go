package main

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/c10d-go/c10d/backend/cuda/driver"
)

func TestRun(t *testing.T) {
	for _, where := range []string{"sim", "cuda"} {
		t.Run(where, func(t *testing.T) {
			if where == "sim" {
				defer goleak.VerifyNone(t)
			}
			sums, err := run(where, 2)
			if where == "cuda" && errors.Is(err, driver.ErrNoDevice) {
				t.Skip(err)
			}
			require.NoError(t, err)
			require.Len(t, sums, elements)
			for i, v := range sums {
				require.Equal(t, uint32(i*i+(i+1)*(i+1)), v)
			}
		})
	}
}

func TestNowhere(t *testing.T) {
	_, err := run("tpu", 2)
	require.EqualError(t, err, `kernel: -device: "tpu" must be sim or cuda`)
}
