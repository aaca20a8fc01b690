package sim_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/c10d-go/c10d/backend/cuda/driver"
	"github.com/c10d-go/c10d/backend/cuda/driver/sim"
)

// Two streams, a kernel, and an event that makes one wait for the other.
func Example() {
	d, err := sim.Open(sim.Config{Devices: 2, Kernels: map[string]sim.Kernel{
		"scale": func(k *sim.Run) error { // scale(x *f32, n u64, by f32)
			x := sim.Slice[float32](k.Write(k.Ptr(0), 4*k.Int(1)))
			for i := range x {
				x[i] *= k.Float32(2)
			}
			return nil
		},
	}})
	check(err)
	first, err := d.Device(0)
	check(err)
	second, err := d.Device(1)
	check(err)
	const n = 1000
	x, err := first.Alloc(4 * n)
	check(err)
	y, err := second.Alloc(4 * n)
	check(err)
	host, err := d.AllocHost(4 * n)
	check(err)
	a, err := first.NewStream(driver.StreamOptions{Name: "a"})
	check(err)
	b, err := second.NewStream(driver.StreamOptions{Name: "b"})
	check(err)
	module, err := first.Load(sim.Image("scale"))
	check(err)
	scale, err := module.Function("scale")
	check(err)

	for i, numbers := 0, sim.Slice[float32](host.Bytes()); i < n; i++ {
		numbers[i] = float32(i)
	}
	check(a.Copy(x.Ptr(), host.Ptr(), 4*n))
	check(a.Launch(&driver.Launch{
		Function: scale, Grid: driver.Dim{X: 4}, Block: driver.Dim{X: 256},
		Args:   new(driver.Args).Ptr(x.Ptr()).Int64(n).Float32(0.5),
		Access: []driver.Access{driver.Writes(x.Ptr(), 4*n)},
	}))
	scaled, err := a.Record()
	check(err)
	check(b.Wait(scaled)) // without it Close reports a race
	scaled.Release()
	check(b.Copy(y.Ptr(), x.Ptr(), 4*n))
	check(b.Copy(host.Ptr(), y.Ptr(), 4*n))
	done, err := b.Record()
	check(err)
	check(done.Sync(context.Background()))
	done.Release()
	fmt.Println(sim.Slice[float32](host.Bytes())[999])

	for _, c := range []interface{ Close() error }{module, a, b, x, y, host} {
		check(c.Close())
	}
	fmt.Println("wrong:", d.Close())
	// Output:
	// 499.5
	// wrong: <nil>
}

// What is reported when an order is missing.
func ExampleRace() {
	d, err := sim.Open(sim.Config{Quiet: true})
	check(err)
	gpu, err := d.Device(0)
	check(err)
	x, err := gpu.Alloc(100)
	check(err)
	a, err := gpu.NewStream(driver.StreamOptions{Name: "a"})
	check(err)
	b, err := gpu.NewStream(driver.StreamOptions{Name: "b"})
	check(err)

	check(a.Memset(x.Ptr(), 1, 60))
	check(b.Memset(x.Ptr()+50, 2, 50)) // does not wait for a

	check(d.Machine().Settle(context.Background()))
	for _, c := range []interface{ Close() error }{a, b, x} {
		check(c.Close())
	}
	var race *sim.Race
	if errors.As(d.Close(), &race) {
		fmt.Println("bytes", race.From, "to", race.To)
	}
	// Output: bytes 50 to 60
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
