// Package cuda_test has this file in place of backend/cuda's own in the test program that
// "make gorgonia" makes.
package cuda_test

import (
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/gorgonia"
)

func openReal() (driver.Driver, error) { return gorgonia.Open(gorgonia.Options{}) }
