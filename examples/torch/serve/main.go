// Command serve answers predictions with the newest parameters of a PyTorch trainer. The
// trainer sends them over a process group, in which it is one rank and this program the
// other. README.md tells how to run both.
//
//	go run ./examples/torch/serve
//	python3 examples/torch/serve/trainer.py
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/c10d-go/c10d/examples/internal/dataset"
	"github.com/c10d-go/c10d/store/tcp"
)

func main() {
	var c config
	flag.StringVar(&c.http, "http", "127.0.0.1:8080", "`host:port` to answer predictions on")
	flag.StringVar(&c.store, "store", "127.0.0.1:29400", "`host:port` for trainers; no host means all interfaces")
	flag.DurationVar(&c.timeout, "timeout", 30*time.Second, "longest `duration` for a trainer to join, and to send a set")
	flag.Parse()
	if flag.NArg() > 0 || c.timeout <= 0 {
		fmt.Fprintln(os.Stderr, "serve: there are no arguments, and -timeout must be positive")
		os.Exit(2)
	}
	c.log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	s, err := listen(ctx, c)
	if err == nil {
		fmt.Printf("page and predictions on http://%s, trainers on %s\n", s.listener.Addr(), s.store.Addr())
		err = s.run(ctx)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

type config struct {
	http, store string
	timeout     time.Duration
	log         *slog.Logger
}

// service is the whole program: it listens, and answers once it runs.
type service struct {
	config
	listener net.Listener
	store    *tcp.Store
	web      web
}

func listen(ctx context.Context, c config) (*service, error) {
	data, err := dataset.Digits()
	if err != nil {
		return nil, err
	}
	s := &service{config: c}
	// Whoever reaches the store can write to it. A trainer needs some KiB.
	st, err := tcp.New(ctx, c.store, tcp.Options{
		Server: true, ServerOptions: tcp.ServerOptions{MaxMemory: 64 << 20, MaxClients: 256},
	})
	if err != nil {
		return nil, err
	}
	s.store = st
	var lc net.ListenConfig
	if s.listener, err = lc.Listen(ctx, "tcp", c.http); err != nil {
		return nil, errors.Join(fmt.Errorf("serve: %w", err), st.Close())
	}
	w := new(weights)
	s.web = web{weights: w, images: &data.HeldOut, link: &link{store: st, weights: w, timeout: c.timeout, log: c.log}}
	return s, nil
}

// run serves until ctx ends. What is being answered then is answered.
func (s *service) run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	server := &http.Server{Handler: s.web.handler(), ReadTimeout: s.timeout, WriteTimeout: s.timeout}
	var wg sync.WaitGroup
	var linkErr, httpErr error
	wg.Go(func() {
		linkErr = s.web.link.run(ctx)
		cancel(linkErr)
	})
	wg.Go(func() {
		if err := server.Serve(s.listener); !errors.Is(err, http.ErrServerClosed) {
			httpErr = fmt.Errorf("serve: %w", err)
			cancel(httpErr)
		}
	})
	<-ctx.Done()
	ending, stop := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer stop()
	shutdown := server.Shutdown(ending)
	wg.Wait()
	return errors.Join(linkErr, httpErr, shutdown, s.store.Close())
}
