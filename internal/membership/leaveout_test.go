package membership

import (
	"testing"

	"github.com/c10d-go/c10d/internal/leaveout"
)

// TestEachCheckIsNecessary: a test misses each check of the two machines.
func TestEachCheckIsNecessary(t *testing.T) {
	leaveout.Each(t, []string{"-test.skip=TestTheModelFindsFlaws", "-model.runs=1000"}, nil, "member.go")
}
