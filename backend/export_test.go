package backend

// Forget empties the registry and returns what puts back what was in it.
func Forget() (restore func()) {
	registry.Lock()
	defer registry.Unlock()
	backends := registry.backends
	registry.backends = nil
	return func() {
		registry.Lock()
		defer registry.Unlock()
		registry.backends = backends
	}
}
