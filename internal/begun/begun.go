// Package begun lets the timeout of an operation count from an earlier time than its call.
//
// Package detail checks a call before it issues the operation. Both together have the operation's timeout.
package begun

import (
	"context"
	"time"
)

// Context is a context for operations whose timeouts count from Since. A context derived from it has no
// such effect: whoever looks for it only looks at the context itself, so that an operation costs no search.
type Context struct {
	context.Context
	Since time.Time
}
