// Package callback matches values with the callbacks that wait for them, whichever comes first.
//
// # Two layers
//
// A [Match] is the pure part: queues by key, in which the n-th value of a key matches its n-th
// taker. It has no goroutines and no locks. The native TCP transport has two for each peer:
// messages match receives, and grants match sends.
//
// In a [Registry] callbacks are functions, and a key names one value: a step of one collective of
// one group. It is the receive side of package chain.
//
//	r := callback.NewRegistry(callback.Limits{})
//	err := r.SetCallback(key, func(value []byte, err error) { ... })
//	...
//	err = r.SetValue(ctx, key, value) // on arrival of a message
//
// # Guarantees of a registry
//
//   - Each callback runs exactly once: with its value, or with the error that
//     ended it.
//   - It runs without the lock, in the goroutine whose call completed the pair, so it may use the
//     registry.
//   - A second value or callback for a key is refused, even after the pair was complete, until
//     the collective is over. Values and callbacks for a collective that is over are refused as
//     late.
//   - Values without a callback are bounded in number and bytes. SetValue waits while there is no
//     room, until its callback is set, there is room, or its context ends. No value is lost.
//   - EndCollective, EndGroup and End give every waiting callback, and every later one, an error.
//     Nothing is left in the registry.
package callback
