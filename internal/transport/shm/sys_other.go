//go:build !linux

package shm

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Endpoint is a rank that may join a group. Here there is none.
type Endpoint struct{}

var errHere = fmt.Errorf("shm: needs Linux: %w", errors.ErrUnsupported)

// NewEndpoint returns an error that wraps errors.ErrUnsupported.
func NewEndpoint() (*Endpoint, error) { return nil, errHere }

// Addr returns nothing.
func (e *Endpoint) Addr() string { return "" }

// Join returns an error that wraps errors.ErrUnsupported.
func (e *Endpoint) Join(context.Context, int, []string, Options) (*Group, error) { return nil, errHere }

// Close does nothing.
func (e *Endpoint) Close() error { return nil }

func sleepOn(*uint32, uint32, time.Duration) {}
func wake(*uint32)                           {}
func yield()                                 {}
func unmap([]byte) error                     { return nil }
