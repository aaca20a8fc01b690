package sim

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/drivertest"
	"github.com/c10d-go/c10d/internal/must"
)

func TestParsePTX(t *testing.T) {
	entries, err := parsePTX([]byte(drivertest.PTX + "\x00"))
	require.NoError(t, err)
	p32, p64 := param{4, 4}, param{8, 8}
	require.Equal(t, []entryPoint{
		{drivertest.Fill, []param{p64, p32, p32}, true},
		{drivertest.Add, []param{p64, p64, p32}, true},
		{drivertest.Delay, []param{p64}, true},
		{drivertest.Await, []param{p64, p32}, true},
		{drivertest.Params, []param{p64, p32, {32, 8}, p32, p32}, true},
	}, entries)

	// As compilers write it.
	entries, err = parsePTX([]byte(`
// Generated
.version 8.3 /* .entry not_this */
.target sm_90
.address_size 64
.func (.param .b32 r) helper(.param .b64 x) { ret; }
.visible .entry k1()
{ ret; }
.weak .entry k2(
	.param .u64 .ptr .global .align 16 k2_param_0,
	.param .align 16 .b8 k2_param_1[64],
	.param .f32 k2_param_2,
	.param .u16 k2_param_3
) .maxntid 512, 1, 1
{ ret; }`))
	require.NoError(t, err)
	require.Equal(t, []entryPoint{
		{"k1", nil, true},
		{"k2", []param{{8, 8}, {64, 16}, {4, 4}, {2, 2}}, true},
	}, entries)
	entries = must.Get(parsePTX(Image("a", "b")))
	require.Equal(t, []entryPoint{{name: "a"}, {name: "b"}}, entries)

	head := ".version 8.3\n.target sm_90\n"
	for _, bad := range []string{
		"", "x", head, head + ".entry", head + ".entry {", head + ".entry k(", head + ".entry k(.param .u63 x)",
		head + ".entry k(.param .align 3 .b8 x[4])", head + ".entry k(.param .b8 x[99999])", head + ".entry k(int x)",
	} {
		require.Error(t, must.Err(parsePTX([]byte(bad))), "%q", bad)
	}
}

func TestCheckArgs(t *testing.T) {
	f := Function{entry: &entryPoint{typed: true, params: []param{{8, 8}, {4, 4}, {32, 8}, {4, 4}}}}
	args := func() *driver.Args { return new(driver.Args).Uint64(1).Uint32(2).Struct(make([]byte, 32), 8) }
	require.NoError(t, f.checkArgs(args().Uint32(3)))
	require.Error(t, f.checkArgs(nil))
	require.Error(t, f.checkArgs(args()), "too few")
	require.Error(t, f.checkArgs(args().Uint32(3).Uint32(4)), "too many")
	require.Error(t, f.checkArgs(args().Uint64(3)), "too large")
	require.Error(t, f.checkArgs(new(driver.Args).Uint32(1).Uint32(2).Struct(make([]byte, 32), 8).Uint32(3)), "too small")
	require.Error(t, f.checkArgs(new(driver.Args).Uint64(1).Uint32(2).Struct(make([]byte, 32), 4).Uint32(3)), "at another place")
}

func FuzzParsePTX(f *testing.F) {
	f.Add([]byte(drivertest.PTX))
	f.Add(Image("x"))
	f.Add([]byte(".version 1\n.target x\n.entry a(.param .align 8 .b8 x[12], .param .u64 .ptr .global y)"))
	f.Fuzz(func(t *testing.T, b []byte) {
		entries, err := parsePTX(b)
		if err != nil {
			return
		}
		for _, e := range entries {
			for _, p := range e.params {
				if p.size < 1 || p.align < 1 || p.align&(p.align-1) != 0 {
					t.Fatalf("%+v", e)
				}
			}
		}
	})
}

func TestClock(t *testing.T) {
	var none clock
	a := none.with(2, 5)
	require.Equal(t, clock{0, 0, 5}, a)
	require.True(t, a.covers(none))
	require.False(t, none.covers(a))
	b := none.with(0, 1)
	j := a.join(b)
	require.Equal(t, clock{1, 0, 5}, j)
	require.Equal(t, clock{0, 0, 5}, a, "published clocks do not change")
	require.True(t, j.covers(a) && j.covers(b) && !a.covers(b))
	require.Equal(t, j, j.join(a))
	require.Zero(t, a.at(17))
}
