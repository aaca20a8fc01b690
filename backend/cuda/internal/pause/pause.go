// Package pause says how long goroutines that poll let others run before they sleep.
package pause

import "time"

// Yield is how long a goroutine that waits for a device only yields. An idle process sleeps for at least a millisecond,
// however short a time it asks for (the runtime's epoll_wait). Tests on virtual time set it to 0: virtual time does not
// pass while a goroutine polls.
var Yield = 8 * time.Millisecond
