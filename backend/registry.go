package backend

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/c10d-go/c10d/tensor"
)

// Registration describes a backend that groups can ask for by name.
type Registration struct {
	Name    string              // lower case; no comma, no colon
	Devices []tensor.DeviceType // what it can serve
	New     func(ctx context.Context, o Options) (Backend, error)
}

var registry struct {
	sync.RWMutex
	backends map[string]Registration
}

// Register makes a backend known, usually from an init function. The name is
// taken in lower case; a name that is taken already is an error.
func Register(r Registration) error {
	r.Name = strings.ToLower(r.Name)
	if r.Name == "" || strings.ContainsAny(r.Name, ",: ") {
		return fmt.Errorf("backend: bad name %q", r.Name)
	}
	if r.New == nil || len(r.Devices) == 0 {
		return fmt.Errorf("backend: %q has no constructor or no devices", r.Name)
	}
	registry.Lock()
	defer registry.Unlock()
	if _, taken := registry.backends[r.Name]; taken {
		return fmt.Errorf("backend: %q already exists", r.Name)
	}
	if registry.backends == nil {
		registry.backends = make(map[string]Registration)
	}
	r.Devices = slices.Clone(r.Devices)
	registry.backends[r.Name] = r
	return nil
}

// Lookup returns the backend called name, in any case.
func Lookup(name string) (Registration, bool) {
	registry.RLock()
	defer registry.RUnlock()
	r, ok := registry.backends[strings.ToLower(name)]
	return r, ok
}

// Names returns the known backends in order.
func Names() []string {
	registry.RLock()
	defer registry.RUnlock()
	names := make([]string, 0, len(registry.backends))
	for n := range registry.backends {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}

// DeviceBackend says which backend serves a device type.
type DeviceBackend struct {
	Device  tensor.DeviceType
	Backend string
}

// String returns "cpu:gloo", as in a backend string.
func (d DeviceBackend) String() string { return d.Device.String() + ":" + d.Backend }

// defaults is what the empty backend string means, as far as it is linked in.
var defaults = []DeviceBackend{{tensor.CPU, "gloo"}, {tensor.CUDA, "cuda"}}

// ErrUnknownBackend is matched when a backend string names a backend that no
// package in the program registered.
var ErrUnknownBackend = errors.New("backend not registered")

// ParseDevices reads a backend string as c10d does. "cpu:gloo,cuda:cuda" maps
// each device type to a backend. "gloo" gives a backend all the devices that it
// can serve. "" is the default map without the backends that are not linked in.
func ParseDevices(s string) ([]DeviceBackend, error) {
	if s == "" {
		var m []DeviceBackend
		for _, d := range defaults {
			if _, ok := Lookup(d.Backend); ok {
				m = append(m, d)
			}
		}
		if len(m) == 0 {
			return nil, fmt.Errorf("backend: no default backend: %w; import one, for example backend/gloo", ErrUnknownBackend)
		}
		return m, nil
	}
	if !strings.ContainsAny(s, ":,") {
		r, err := lookup(s)
		if err != nil {
			return nil, err
		}
		m := make([]DeviceBackend, len(r.Devices))
		for i, d := range r.Devices {
			m[i] = DeviceBackend{d, r.Name}
		}
		return m, nil
	}
	var m []DeviceBackend
	for _, pair := range strings.Split(s, ",") {
		dev, name, ok := strings.Cut(pair, ":")
		if !ok || dev == "" || name == "" || strings.Contains(name, ":") {
			return nil, fmt.Errorf("backend: invalid device:backend pairing %q in %q", pair, s)
		}
		d, err := tensor.ParseDeviceType(dev)
		if err != nil {
			return nil, fmt.Errorf("backend: in %q: %w", s, err)
		}
		if slices.ContainsFunc(m, func(x DeviceBackend) bool { return x.Device == d }) {
			return nil, fmt.Errorf("backend: duplicate device type %v in %q", d, s)
		}
		r, err := lookup(name)
		if err != nil {
			return nil, err
		}
		if !slices.Contains(r.Devices, d) {
			return nil, fmt.Errorf("backend: %s cannot serve device type %v", r.Name, d)
		}
		m = append(m, DeviceBackend{d, r.Name})
	}
	return m, nil
}

func lookup(name string) (Registration, error) {
	r, ok := Lookup(name)
	if !ok {
		return r, fmt.Errorf("backend: %q: %w (known: %s)", name, ErrUnknownBackend, strings.Join(Names(), ", "))
	}
	return r, nil
}
