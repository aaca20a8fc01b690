package main

import (
	"os"
	"testing"
)

// programVariable makes the test binary the program.
const programVariable = "TOOLS_TEST_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(programVariable) != "" {
		main()
	}
	os.Exit(m.Run())
}
