// Package callback matches arrivals with the callbacks that wait for them, in any order.
//
//   - A [Match] has queues by key, in which the n-th value of a key goes to its n-th taker. It has no
//     locks. The native TCP transport has two for each peer: messages match receives, and grants
//     match sends.
//   - A [Registry] pairs one arrival with one callback for each key. Arrivals come from any
//     goroutine; one goroutine runs all callbacks. The network stage of clusters and
//     the ring of Options.AllReduce in package gloo have one: ends of messages, and readiness of data, meet the steps that
//     wait for them.
//
// Neither has goroutines.
package callback
