package tensor

import (
	"fmt"
	"strconv"
)

// DeviceType is a kind of device.
type DeviceType uint8

// The device types. The numbers are PyTorch's.
const (
	CPU  DeviceType = 0
	CUDA DeviceType = 1
)

func (t DeviceType) String() string {
	switch t {
	case CPU:
		return "cpu"
	case CUDA:
		return "cuda"
	}
	return "device(" + strconv.Itoa(int(t)) + ")"
}

// ParseDeviceType returns the device type called name.
func ParseDeviceType(name string) (DeviceType, error) {
	switch name {
	case "cpu":
		return CPU, nil
	case "cuda":
		return CUDA, nil
	}
	return 0, fmt.Errorf("tensor: unknown device type %q (known: cpu, cuda)", name)
}

// Device says where a tensor's elements live. The zero value is the CPU.
type Device struct {
	Type  DeviceType
	Index int // which GPU; 0 for the CPU
}

func (d Device) String() string {
	if d.Type == CPU {
		return "cpu"
	}
	return d.Type.String() + ":" + strconv.Itoa(d.Index)
}

// Memory is the device memory of a tensor. The package that allocates it implements the
// interface; its backend knows the concrete type. Memory that also has the method Address() uint64,
// which returns the address of the first byte, lets Range and Overlaps tell which tensors share bytes.
type Memory interface {
	Device() Device
	Len() int // bytes
}

// Layout tells how a tensor's elements are stored.
type Layout uint8

const (
	// Strided tensors have a storage and a stride for each dimension.
	Strided Layout = iota
	// SparseCOO tensors have a list of coordinates and the values there.
	SparseCOO
)

func (l Layout) String() string {
	switch l {
	case Strided:
		return "strided"
	case SparseCOO:
		return "sparse_coo"
	}
	return fmt.Sprintf("layout(%d)", uint8(l))
}
