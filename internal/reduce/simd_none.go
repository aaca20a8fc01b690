//go:build !(amd64 || arm64) || purego

package reduce

// assemblies returns nothing: here the portable loops do everything.
func assemblies() []fast { return nil }

func copier() func(dst, src []byte) { return nil }
