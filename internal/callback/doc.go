// Package callback joins values with the callbacks that wait for them,
// whichever comes first.
//
// # Two layers
//
// A [Match] is the pure part: queues by key, where the n-th value of a key meets
// its n-th taker. It runs nothing and locks nothing. The native TCP transport
// has two of them for each peer: messages that meet receives, and grants that
// meet sends.
//
// A [Registry] is one for callbacks that are functions and keys that name one
// value each, a step of one collective of one group: the receive side of
// algorithms that are chains of callbacks (package chain).
//
//	r := callback.NewRegistry(callback.Limits{})
//	err := r.SetCallback(key, func(value []byte, err error) { ... })
//	...
//	err = r.SetValue(ctx, key, value) // on arrival of a message
//
// # What a registry guarantees
//
//   - Each callback runs exactly once: with its value, or with the error that
//     ended it.
//   - It runs outside the lock, in the goroutine that came second, so it may use
//     the registry.
//   - Who sets a value or a callback twice is refused, and the first stays.
//     That holds after they have met, too, until the collective is over; and what
//     comes for a collective that is over is late, and refused.
//   - Values without a callback are bounded in number and bytes. SetValue waits
//     when there is no room: it loses nothing and it stores nothing more. It goes on
//     when its own callback is set, when there is room, or when its context ends.
//   - End gives every callback that waits, and every later one, an error: of one
//     collective, of one group or of all. Nothing is left in the registry.
package callback
