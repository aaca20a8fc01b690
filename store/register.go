package store

import (
	"context"
	"crypto/tls"
	"fmt"
	"sync"
	"time"
)

// An Opener opens the store that a URL names. Package pg has one for each scheme but env, tcp and file,
// which are its own.
type Opener func(ctx context.Context, url string, o OpenOptions) (Store, error)

// OpenOptions are what pg.Init tells an Opener.
type OpenOptions struct {
	// Prefix is the job's part of all names. It separates jobs that use one server.
	Prefix string

	// Timeout is the store's timeout, see SetTimeout.
	Timeout time.Duration

	// TLS protects the connections of the store. Nil means that the job has no TLS. An Opener that
	// cannot use it returns an error.
	TLS *tls.Config
}

var openers sync.Map // of Opener, by scheme

// Register lets pg.Init open the URLs of a scheme. Packages call it from init, so a program imports a
// store to use its URLs:
//
//	import _ "github.com/c10d-go/c10d/store/redis" // redis:// and rediss://
//
// It panics if the scheme is registered already, is empty, or if open is nil.
func Register(scheme string, open Opener) {
	if scheme == "" || open == nil {
		panic("store: Register without a scheme or without an Opener")
	}
	if _, twice := openers.LoadOrStore(scheme, open); twice {
		panic("store: Register called twice for scheme " + scheme)
	}
}

// Lookup returns the Opener of a scheme. The error says which import the program lacks.
func Lookup(scheme string) (Opener, error) {
	if open, ok := openers.Load(scheme); ok {
		return open.(Opener), nil
	}
	if scheme == "redis" || scheme == "rediss" {
		return nil, fmt.Errorf("store: %s:// is not in this program: add import _ \"github.com/c10d-go/c10d/store/redis\" to it", scheme)
	}
	return nil, fmt.Errorf("store: no store for scheme %q: there are env, tcp, file, redis, rediss and those of store.Register", scheme)
}
