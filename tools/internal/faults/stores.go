package faults

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/c10d-go/c10d/internal/freeport"
	"github.com/c10d-go/c10d/store"
	"github.com/c10d-go/c10d/store/redis"
	"github.com/c10d-go/c10d/store/tcp"
)

// StoreKind is the store of a Trial.
type StoreKind string

const (
	TCPStore   StoreKind = "TCP"
	RedisStore StoreKind = "Redis" // needs redis-server
	FileStore  StoreKind = "file"
)

// StoreKinds are all kinds of stores.
var StoreKinds = []StoreKind{TCPStore, RedisStore, FileStore}

// serve starts a store. It returns the URL with which processes open it, and what ends it.
func (k StoreKind) serve(ctx context.Context) (url string, stop func(), err error) {
	switch k {
	case TCPStore:
		server, err := tcp.Listen(ctx, "127.0.0.1:0")
		if err != nil {
			return "", nil, err
		}
		return "tcp://" + server.Addr().String(), func() { server.Close() }, nil
	case RedisStore:
		return serveRedis(ctx)
	}
	dir, err := os.MkdirTemp("", "faults")
	return "file://" + filepath.Join(dir, "store"), func() { os.RemoveAll(dir) }, err
}

func serveRedis(ctx context.Context) (url string, stop func(), err error) {
	addr, err := freeport.Reserve()
	if err != nil {
		return "", nil, err
	}
	_, port, _ := net.SplitHostPort(addr)
	cmd := exec.Command("redis-server", "--port", port, "--bind", "127.0.0.1", "--save", "", "--maxmemory-policy", "noeviction")
	if err := cmd.Start(); err != nil {
		return "", nil, err
	}
	stop = func() {
		cmd.Process.Kill()
		cmd.Wait()
	}
	url = "redis://" + addr + "/0?prefix=trial"
	for end := time.Now().Add(startIn); ; time.Sleep(10 * time.Millisecond) {
		st, err := redis.New(ctx, url)
		if err == nil {
			return url, stop, st.Close()
		}
		if ctx.Err() != nil || time.Now().After(end) {
			stop()
			return "", nil, fmt.Errorf("redis-server: %w", err)
		}
	}
}

// openStore opens the store at a URL of serve.
func openStore(ctx context.Context, url string) (store.Store, error) {
	scheme, rest, _ := strings.Cut(url, "://")
	switch scheme {
	case "tcp":
		return tcp.New(ctx, rest, tcp.Options{Timeout: startIn})
	case "file":
		return store.NewFile(rest, 0)
	}
	st, err := redis.New(ctx, url)
	if err == nil {
		st.SetTimeout(startIn)
	}
	return st, err
}
