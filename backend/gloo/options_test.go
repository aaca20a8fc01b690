package gloo_test

import (
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/backend/gloo"
	"github.com/c10d-go/c10d/internal/must"
	"github.com/c10d-go/c10d/store"
)

// TestInterfaceVariable: GLOO_SOCKET_IFNAME has to name interfaces of this host, on all wires.
func TestInterfaceVariable(t *testing.T) {
	lo := loopback(t)
	for value, want := range map[string]string{
		lo: "", " " + lo + " ": "", lo + "," + lo: "", "x": "", "": "",
		"ens9":         `no interface "ens9" (there are `,
		lo + ",nosuch": `no interface "nosuch" (there are `,
		lo + ",":       `no interface "" (there are `,
		"^" + lo:       `; as in Gloo, ^ and = have no meaning here: list whole names`,
	} {
		t.Setenv("GLOO_SOCKET_IFNAME", value)
		for _, wire := range []gloo.Wire{gloo.WireAuto, gloo.WireGloo, gloo.WireNative} {
			st := store.NewHash()
			b, err := gloo.New(t.Context(), backend.Options{Store: st, Rank: 0, Size: 1, Timeout: 15 * time.Second, Specific: gloo.Options{Wire: wire}})
			if want == "" {
				require.NoError(t, err, "%q", value)
				require.NoError(t, b.Close())
			} else {
				require.ErrorContains(t, err, "gloo: environment variable GLOO_SOCKET_IFNAME: ", "%q", value)
				require.ErrorContains(t, err, want, "%q", value)
				require.ErrorContains(t, err, lo, "%q", value)
			}
			require.NoError(t, st.Close())
		}
	}
}

// loopback returns the name of the loopback interface.
func loopback(t *testing.T) string {
	t.Helper()
	all := must.Get(net.Interfaces())
	for _, i := range all {
		if i.Flags&net.FlagLoopback != 0 {
			return i.Name
		}
	}
	t.Skip("no loopback interface")
	return ""
}

// TestBadOptions: an option that has no meaning is refused by each rank for itself, before it
// meets others.
type otherOptions struct{}

func (otherOptions) BackendName() string { return "other" }

type otherFabric struct{ gloo.Fabric }

func TestBadOptions(t *testing.T) {
	for _, tc := range []struct {
		name       string
		rank, size int
		specific   backend.SpecificOptions
		text       string
	}{
		{"interface", 0, 1, gloo.Options{Interfaces: []string{loopback(t), "nosuch"}}, `gloo: Options.Interfaces: no interface "nosuch" (there are `},
		{"wire", 0, 1, gloo.Options{Wire: "pigeon"}, `unknown wire "pigeon"`},
		{"sums", 0, 1, gloo.Options{Sums: "rough"}, `"rough"`},
		{"table", 0, 1, gloo.Options{Tuning: gloo.Tuning{Table: t.TempDir()}}, "directory"},
		{"rank", 2, 2, gloo.Options{}, "rank 2 is not within a group of 2"},
		{"negative rank", -1, 2, gloo.Options{}, "rank -1 is not within a group of 2"},
		{"size", 0, 0, gloo.Options{}, "rank 0 is not within a group of 0"},
		{"options of another backend", 0, 1, otherOptions{}, "gloo: options of type gloo_test.otherOptions, want gloo.Options"},
		{"fabric", 0, 1, gloo.Options{Fabric: otherFabric{}}, "Options.Fabric is a gloo_test.otherFabric: set it to what NewFabric returns"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			st := store.NewHash()
			defer st.Close()
			b, err := gloo.New(t.Context(), backend.Options{Store: st, Rank: tc.rank, Size: tc.size, Timeout: 15 * time.Second, Specific: tc.specific})
			require.ErrorContains(t, err, tc.text)
			require.Nil(t, b)
		})
	}
}
