package cuda_test

import (
	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/nvidia"
)

// openReal opens the driver of the machine's GPUs. "make gorgonia" makes a test program
// with the other driver in its place.
func openReal() (driver.Driver, error) { return nvidia.Open() }
