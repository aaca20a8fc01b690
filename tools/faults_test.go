package main

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/tools/internal/faults"
)

func TestFaultsUsage(t *testing.T) {
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"x"}, `unexpected argument "x"`},
		{[]string{"-random", "-1"}, "-random -1"},
		{[]string{"-soak", "-1s"}, "-soak -1s must not be negative"},
		{[]string{"-soak", "1s", "-wire", "pytorch"}, "no soak is left"},
		{[]string{"-ranks", "2"}, "-ranks 2 is not within 3 to 250"},
		{[]string{"-wire", "memory,udp"}, `-wire: "udp" picks none of: shared memory, native TCP, Gloo's wire, PyTorch gloo`},
		{[]string{"-fault", "fire"}, `-fault: "fire" picks none of: SIGKILL, `},
		{[]string{"-store", "disk"}, `-store: "disk" picks none of: TCP, Redis, file`},
		{[]string{"-op", "all"}, `-op: "all" picks none of: all_reduce, `},
		{[]string{"-wire", "pytorch", "-python", ""}, `no case is left by -wire "pytorch"`},
		{[]string{"-wire", "pytorch", "-random", "3"}, "no case is left"},
		{[]string{"-wire", "pytorch", "-trials", "3"}, "no trial is left"},
	} {
		var out, errs bytes.Buffer
		require.Equal(t, exitUsage, dispatch(stdio{&out, &errs}, append([]string{"faults"}, c.args...)), c.args)
		require.Contains(t, errs.String(), c.want)
	}
	f := faultFlags{wires: "TCP,gloo", faults: "sigkill", ops: "barrier", ranks: 3}
	require.NoError(t, f.checkWords())
	for _, c := range f.cases() {
		require.Equal(t, faults.Kill, c.Fault)
		require.NotEqual(t, faults.Memory, c.Wire)
		require.Equal(t, "barrier", c.Op)
	}
	require.NotEmpty(t, f.cases())
}
