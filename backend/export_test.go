package backend

// Forget empties the registries and returns what puts back what was in them.
func Forget() (restore func()) {
	registry.Lock()
	works.Lock()
	defer registry.Unlock()
	defer works.Unlock()
	backends, list := registry.backends, works.list
	registry.backends, works.list = nil, nil
	return func() {
		registry.Lock()
		works.Lock()
		defer registry.Unlock()
		defer works.Unlock()
		registry.backends, works.list = backends, list
	}
}
