package registered

const RestCalls = restCalls

// Mapping reports whether an address of memory that this rank has mapped is on its way to the kernels.
func (r *Registry) Mapping() bool {
	for p := range r.theirs {
		for i := range r.theirs[p].entries {
			if r.theirs[p].entries[i].event != nil {
				return true
			}
		}
	}
	return false
}
