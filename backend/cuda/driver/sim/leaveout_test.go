package sim_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
	"github.com/c10d-go/c10d/internal/must"
)

// small is a program of two streams: one writes, the other copies. With fault it
// has one.
func small(fault string) func(m *sim.Machine) error {
	return func(m *sim.Machine) (err error) {
		d, err := m.Process("p")
		if err != nil {
			return err
		}
		v, err := d.Device(0)
		if err != nil {
			return err
		}
		var open []interface{ Close() error }
		defer func() {
			if e := m.Settle(context.Background()); err == nil {
				err = e
			}
			if fault == "leaks" && err != nil {
				return
			}
			for _, c := range open {
				c.Close()
			}
		}()
		var s [2]driver.Stream
		for i := range s {
			if s[i], err = v.NewStream(driver.StreamOptions{Name: fmt.Sprint("s", i)}); err != nil {
				return err
			}
			open = append(open, s[i])
		}
		x, err := v.Alloc(200)
		if err != nil {
			return err
		}
		open = append(open, x)
		if err := s[0].Memset(x.Ptr(), 1, 100); err != nil {
			return err
		}
		waits := 1
		if fault == "waits twice" {
			waits = 2
		}
		for range waits {
			e, err := s[0].Record()
			if err != nil {
				if fault == "careless" {
					return nil
				}
				return err
			}
			err = s[1].Wait(e)
			e.Release()
			if err != nil {
				if fault == "vague" {
					return errors.New("something failed")
				}
				return err
			}
		}
		return s[1].Copy(x.Ptr()+100, x.Ptr(), 100)
	}
}

func TestLeaveOut(t *testing.T) {
	tried, unmissed, err := sim.LeaveOut(sim.Config{}, small(""))
	require.NoError(t, err)
	require.Empty(t, unmissed)
	require.Len(t, tried, 2)
	require.Equal(t, "call 1: Record on p/s0", tried[0].String())
	require.Equal(t, sim.Call{Name: "Wait", Device: 0, Stream: "p/s1", N: 2}, tried[1])

	tried, unmissed, err = sim.LeaveOut(sim.Config{}, small("waits twice"))
	require.NoError(t, err)
	require.Len(t, tried, 4)
	require.Equal(t, tried, unmissed, "one is enough, whichever")

	_, _, err = sim.LeaveOut(sim.Config{Devices: -1}, small(""))
	require.Error(t, err)
}

func TestFailEach(t *testing.T) {
	cause := errors.New("injected")
	calls, err := sim.FailEach(sim.Config{}, cause, small(""))
	require.NoError(t, err)
	require.Equal(t, 8, calls)
	for fault, want := range map[string]string{
		"careless": "call 5: Record on p/s0 failed and the program did not notice",
		"vague":    "call 6: Wait on p/s1 failed with injected, the program with something failed",
		"leaks":    "call 2: NewStream on device 0 failed, and open are 1 streams",
	} {
		require.ErrorContains(t, must.Err(sim.FailEach(sim.Config{}, cause, small(fault))), want, fault)
	}
}
