package meet

import (
	"testing"

	"github.com/c10d-go/c10d/internal/leaveout"
)

// TestEachCheckIsNecessary: a test misses each check of calls, logs and notices. Random meetings are not needed for that.
func TestEachCheckIsNecessary(t *testing.T) {
	leaveout.Each(t, []string{"-test.skip=TestRandomMeetings|TestTheCrashesFindFlaws|TestCrashAtEachCall|TestThousandRanks"}, nil, "call.go", "log.go", "notice.go")
}
