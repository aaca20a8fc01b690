package nvidia_test

import (
	"errors"
	"fmt"
	"log"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/nvidia"
)

// A program that uses GPUs where there are some.
func ExampleOpen() {
	d, err := nvidia.Open()
	if errors.Is(err, driver.ErrNoDevice) {
		log.Printf("going on with the CPU: %v", err)
		return
	}
	if err != nil {
		log.Fatal(err)
	}
	defer d.Close()
	for i := range d.Count() {
		v, err := d.Device(i)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(v.ID(), v.Info().Name)
	}
}
