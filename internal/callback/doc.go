// Package callback matches values with the takers that wait for them, whichever comes first.
//
// A [Match] has queues by key, in which the n-th value of a key goes to its n-th taker. It has no
// goroutines and no locks. The native TCP transport has two for each peer: messages match
// receives, and grants match sends.
//
// Package chain has a registry of its own, in which a key has one arrival and one callback.
package callback
