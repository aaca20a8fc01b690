package pg

// The default set of backends: a program that imports pg can use these.
import _ "github.com/c10d-go/c10d/backend/gloo"
