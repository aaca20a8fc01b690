package tcp

import (
	"testing"

	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/store/storetest"
)

var v1Lacks = []storetest.Feature{storetest.Queues, storetest.ListKeys, storetest.Wills}

func TestConformance(t *testing.T) {
	t.Parallel()
	certs := newCerts(t)
	for name, c := range map[string]struct {
		opts Options
		no   []storetest.Feature
	}{
		"v1":     {opts: Options{dialect: torch1}, no: v1Lacks},
		"v2":     {opts: Options{dialect: pytorch, ServerOptions: ServerOptions{plain: true}}, no: []storetest.Feature{storetest.Wills}},
		"native": {},
		"TLS":    {opts: Options{TLS: certs.both}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			storetest.Run(t, storetest.Config{
				New: func(t *testing.T) store.Store {
					opts := c.opts
					opts.Server = true
					return join(t, local, opts)
				},
				No: c.no,
			})
		})
	}

	// As clients of a server that lives elsewhere, each handle on its own.
	t.Run("peers", func(t *testing.T) {
		t.Parallel()
		storetest.Run(t, storetest.Config{
			New: func(t *testing.T) store.Store {
				return join(t, serve(t, ServerOptions{}).Addr().String(), Options{})
			},
			Peer: func(t *testing.T, s store.Store) store.Store {
				return join(t, s.(*Store).Addr(), Options{})
			},
		})
	})
}
