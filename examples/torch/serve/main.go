// Command serve answers predictions with the newest parameters of a PyTorch trainer, which package weights brings.
// README.md tells how to run both.
//
//	python3 examples/torch/serve/trainer.py
//	go run -C examples/torch/serve .
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/c10d-go/c10d/weights"
)

func main() {
	var c config
	flag.StringVar(&c.http, "http", "127.0.0.1:8080", "`host:port` to answer predictions on")
	flag.StringVar(&c.trainer, "trainer", "127.0.0.1:29400", "`host:port` of the trainer")
	flag.DurationVar(&c.timeout, "timeout", 30*time.Second, "longest `duration` of connecting to the trainer, and without a part of an update")
	flag.Parse()
	if flag.NArg() > 0 || c.timeout <= 0 {
		fmt.Fprintln(os.Stderr, "serve: there are no arguments, and -timeout must be positive")
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	s, err := listen(ctx, c)
	if err == nil {
		fmt.Printf("predictions on http://%s/predict, parameters from %s\n", s.listener.Addr(), c.trainer)
		err = s.run(ctx)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

type config struct {
	http, trainer string
	timeout       time.Duration
}

// service is the whole program: it listens, and answers once it runs.
type service struct {
	config
	listener net.Listener
	web      web
}

func listen(ctx context.Context, c config) (*service, error) {
	r, err := weights.Dial(c.trainer, weights.ReceiverOptions{Name: "serve", Timeout: c.timeout, Retry: time.Second, MaxBytes: 4*maxElements + 1024, Accept: accept})
	if err != nil {
		return nil, err
	}
	s := &service{config: c, web: web{r}}
	var lc net.ListenConfig
	if s.listener, err = lc.Listen(ctx, "tcp", c.http); err != nil {
		return nil, errors.Join(fmt.Errorf("serve: %w", err), r.Close())
	}
	return s, nil
}

// run serves until ctx ends. What is being answered then is answered.
func (s *service) run(ctx context.Context) error {
	server := &http.Server{Handler: s.web.handler(), ReadTimeout: s.timeout, WriteTimeout: s.timeout, MaxHeaderBytes: 16 << 10}
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(s.listener) }()
	var err error
	select {
	case err = <-failed:
		err = fmt.Errorf("serve: %w", err)
	case <-ctx.Done():
		ending, stop := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer stop()
		err = server.Shutdown(ending)
	}
	return errors.Join(err, s.web.receiver.Close())
}
