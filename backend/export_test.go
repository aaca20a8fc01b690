package backend

// Forget empties the registries and returns what puts back what was in them.
func Forget() (restore func()) {
	registry.Lock()
	works.Lock()
	defer registry.Unlock()
	defer works.Unlock()
	backends, list := registry.backends, works.byKey.Swap(nil)
	registry.backends = nil
	return func() {
		registry.Lock()
		works.Lock()
		defer registry.Unlock()
		defer works.Unlock()
		registry.backends = backends
		works.byKey.Store(list)
	}
}
