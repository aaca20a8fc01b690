package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/c10d-go/c10d/internal/credentials"
	"github.com/c10d-go/c10d/store/tcp"
)

func init() {
	register(command{name: "store", summary: "serve a TCPStore that outlives the ranks", example: "c10d store -listen :29500 -stats 1m", setup: setupStore})
}

func setupStore(flags *flag.FlagSet) func(stdio, []string) (int, error) {
	var o tcp.ServerOptions
	listen := flags.String("listen", "127.0.0.1:29500", "`host:port` to listen on; port 0 means a free one, no host means all interfaces")
	secrets := credentials.FromEnv(os.Getenv)
	secretFlags(flags, &secrets)
	flags.IntVar(&o.MaxClients, "max-clients", 0, "at most `n` connections at a time; 0 means half of the limit of descriptors, and 16384 at most")
	flags.Int64Var(&o.MaxMemory, "max-memory", 0, "at most `n` bytes of keys and values; 0 means 1 GiB")
	stats := flags.Duration("stats", 0, "print statistics to standard error at intervals of this `duration`, and at the end; 0 means never")
	verbose := flags.Bool("v", false, "log refused clients")
	asJSON := flags.Bool("json", false, "print the address, the statistics and the end as JSON lines")

	return func(std stdio, args []string) (int, error) {
		if len(args) > 0 {
			return 0, usagef("unexpected argument %q", args[0])
		}
		if err := secrets.Check(); err != nil {
			return 0, usagef("%v", err)
		}
		if *stats < 0 {
			return 0, usagef("-stats %v: must not be negative", *stats)
		}
		var err error
		if o.TLS, err = secrets.Load(); err != nil {
			return 1, err
		}
		if *verbose {
			o.Logger = slog.New(slog.NewTextHandler(std.err, nil))
		}
		ctx, stop := signal.NotifyContext(context.Background(), endings()...)
		defer stop()
		signal.Ignore(syscall.SIGPIPE) // the store outlives who reads its statistics
		defer signal.Reset(syscall.SIGPIPE)
		collectEarly()
		server, err := tcp.Listen(ctx, *listen, o)
		if err != nil {
			return 1, err
		}
		defer server.Close()

		say := func(v any, text string) error {
			if *asJSON {
				return json.NewEncoder(std.out).Encode(v)
			}
			_, err := fmt.Fprintln(std.out, text)
			return err
		}
		addr := server.Addr().String()
		if err := say(map[string]string{"event": "listening", "addr": addr}, "listening on "+addr); err != nil {
			return 1, err
		}
		var tick <-chan time.Time
		if *stats > 0 {
			t := time.NewTicker(*stats)
			defer t.Stop()
			tick = t.C
		}
		statistics := func() {
			if *stats > 0 {
				printStatistics(std, server.Stats(), *asJSON)
			}
		}
		for {
			select {
			case <-tick:
				statistics()
			case <-ctx.Done():
				statistics()
				if err := server.Close(); err != nil {
					return 1, err
				}
				return 0, say(map[string]string{"event": "closed"}, "closed")
			}
		}
	}
}

// statistics are a store's Stats for JSON.
type statistics struct {
	Event    string `json:"event"`
	Clients  int    `json:"clients"`
	Accepted int64  `json:"accepted"`
	Refused  int64  `json:"refused"`
	Keys     int    `json:"keys"`
	Queues   int    `json:"queues"`
	Waiting  int    `json:"waiting"`
	Bytes    int64  `json:"bytes"`
}

func printStatistics(std stdio, s tcp.Stats, asJSON bool) {
	if asJSON {
		json.NewEncoder(std.out).Encode(statistics{"stats", s.Clients, s.Accepted, s.Refused, s.Keys, s.Queues, s.Waiting, s.Bytes})
		return
	}
	fmt.Fprintf(std.err, "c10d store: %d clients (%d so far, %d refused), %d keys, %d queues, %d keys waited for, %d bytes\n",
		s.Clients, s.Accepted, s.Refused, s.Keys, s.Queues, s.Waiting, s.Bytes)
}
