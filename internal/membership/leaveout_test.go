package membership

import (
	"testing"

	"github.com/c10d-go/c10d/internal/leaveout"
	"github.com/c10d-go/c10d/internal/testsize"
)

// TestEachCheckIsNecessary: a test misses each check of the two machines.
func TestEachCheckIsNecessary(t *testing.T) {
	if !testsize.Long() {
		t.Skip("-short: builds and runs the package's tests once for each check; make nightly does")
	}
	leaveout.Each(t, []string{"-test.skip=TestEachCheckIsNecessary|TestTheModelFindsFlaws", "-model.runs=1000"}, nil, "member.go")
}
