// Package redis is a store.Store in a Redis server, for jobs that have one at
// hand and would rather not give a rank the role of the store's server.
//
//	s, err := redis.New(ctx, "rediss://:secret@redis.example:6379/0?prefix=job-7", redis.Options{})
//	if err != nil {
//		return err
//	}
//	defer s.Close()
//
// # Names and expiry
//
// Everything a store writes lies under its prefix: key k is the Redis string
// "{prefix}k" + k, queue q the Redis list "{prefix}q" + q. The braces keep one
// prefix from being the beginning of another, and put a job's keys into one
// slot where a cluster cares. Ranks of one job need one prefix, and two jobs on
// one server two.
//
// Keys expire, so that a job that ends in whatever way leaves nothing behind:
// a day after they were written, unless Options say otherwise. While any store
// of the job is open it renews all keys of the prefix every third of that
// time; so nothing is lost in a job that runs for weeks, and the data of one
// that died are gone a day after its last process. Delete does the same at once.
//
// # Waiting
//
// Waits ask again and again, first after 1 ms, then in growing steps up to
// 50 ms. Each question is short and an ended context ends the wait at once,
// even while a frozen server owes an answer.
//
// # Failures
//
// A server that goes away is an error of the call, and of every pending wait at
// its next question; the error names the server. Commands are never repeated
// behind the caller's back, because an Add might then count twice. A call that
// ended with an error or with its context may still have been carried out.
//
// go-redis also logs such errors to standard error. This package turns that off with
// redis.SetLogger, because its calls return them. The logger is that of all clients in the
// process. A program with clients of its own can set another in main.
//
// A server that is started again without its data, or another that takes its place,
// is no empty store: New writes a random value under "{prefix}i", and a connection
// that does not find it fails with ErrEmptied.
//
// # What it needs
//
// Redis 4 or later, or a server that speaks its protocol and runs Lua scripts.
// Number of keys and list of keys walk the whole database with SCAN; they are
// meant for people and tests.
package redis
