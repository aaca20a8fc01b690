// Package redis is a store.Store in a Redis server, for jobs that have such a server
// and do not want a rank to host the store.
//
//	s, err := redis.New(ctx, "rediss://:secret@redis.example:6379/0?prefix=job-7")
//	if err != nil {
//		return err
//	}
//	defer s.Close()
//
// The store uses the client github.com/redis/go-redis/v9. A program has it only if it imports this
// package. That import also lets pg.Init take URLs of the schemes redis and rediss:
//
//	import _ "github.com/c10d-go/c10d/store/redis"
//
// # Names and expiry
//
// All names begin with the store's prefix: key k is the Redis string
// "{prefix}k" + k, queue q the Redis list "{prefix}q" + q. The braces keep one
// prefix from being the beginning of another, and put a job's keys into one
// slot of a Redis Cluster. New follows the cluster to the node that has the slot. If the cluster moves the slot
// later, calls fail and name the new node. All ranks of a job use one prefix. Two jobs on one server
// need different prefixes.
//
// Keys expire a day after they were written, unless Options say otherwise, so a job that
// ends in any way leaves nothing behind. While a store of the job is open, it renews all keys
// of the prefix every third of that time. Delete removes a key at once.
//
// # Waiting
//
// All waits of a store poll together, first after 1 ms, then at growing intervals up to 50 ms. A context that ends
// ends the wait at once, even if the server does not answer.
//
// # Failures
//
// When the server goes away, calls fail, and pending waits fail at their next poll. The error
// names the server. Commands are never repeated, because an Add might then count twice. A call
// that ended with an error or with its context may still have been carried out. A QueuePop whose context
// has ended puts its element back, also while the store is being closed. The element is lost if the connection or the process ends before.
//
// go-redis also logs such errors to standard error. This package turns that off with
// redis.SetLogger, because its calls return them. That logger is global to the
// process. A program with clients of its own can set another in main.
//
// New writes a random value under "{prefix}i". A connection that does not find it fails with
// ErrEmptied: the server was started again without its data, or another server took its place.
//
// Kept (store.Keeper) tells whether the server may have lost single keys. It notices that the server
// has evicted keys, was started again, or was replaced by a replica. Package pg asks it when the ranks
// of a group change. For groups that change, set maxmemory-policy noeviction.
//
// # Deaths
//
// The store does not notice that a client's process has ended: it is no store.Willer. Package pg finds dead ranks
// without it, later than with the TCP store. A rank that dies before all ranks are connected is named when
// another rank's connection with it ends, or else at the timeout. Reconfigure waits 0.5 s for a rank that the failed
// operation blamed. It waits a minute for other dead ranks, for example the second of two that died together.
//
// # Requirements
//
// Redis 4 or later, or a server that speaks its protocol and runs Lua scripts.
// NumKeys and ListKeys walk the whole database with SCAN; they are
// meant for people and tests.
package redis
