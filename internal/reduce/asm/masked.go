package main

// kernelsAVX512 returns what AVX-512 does clearly faster than AVX2: floats of one
// or two bytes, and 64-bit integers, for which AVX2 lacks the instructions. The others go
// as fast with AVX2 as memory does, beyond a first-level cache.
func kernelsAVX512() []kernel {
	var l list
	l.elements("BF16", 2, 2, map[string]func(g *generator) operation{
		"sum":     widened(bfloat16, (*ctx).VADDPS),
		"product": widened(bfloat16, (*ctx).VMULPS),
		"min":     picked(bfloat16, (*ctx).VMINPS),
		"max":     picked(bfloat16, (*ctx).VMAXPS),
	})
	for _, name := range []string{"sumBF16", "productBF16"} {
		l.find(name).ahead = 1 << 10 // of 1 MiB, 20.8 GB/s where it was 18.7 (BenchmarkTwins)
	}
	l.elements("F16", 2, 2, map[string]func(g *generator) operation{
		"product": widened(float16, (*ctx).VMULPS),
		"min":     selected(float16, true),
		"max":     selected(float16, false),
	})
	l.find("productF16").store = storeFloat16((*ctx).VMULPS)
	l.elements("E5M2", 1, 1, map[string]func(g *generator) operation{
		"sum":     octets(float8E5M2, (*ctx).VADDPS, false),
		"product": octets(float8E5M2, (*ctx).VMULPS, true),
	})
	l.elements("E4M3", 1, 1, map[string]func(g *generator) operation{
		"sum":     octets(float8E4M3, (*ctx).VADDPS, false),
		"product": octets(float8E4M3, (*ctx).VMULPS, true),
	})
	l.elements("I64", 8, 4, map[string]func(g *generator) operation{
		"product": plain((*ctx).VPMULLQ),
		"min":     plain((*ctx).VPMINSQ),
		"max":     plain((*ctx).VPMAXSQ),
	})
	l.elements("U64", 8, 4, map[string]func(g *generator) operation{
		"min": plain((*ctx).VPMINUQ),
		"max": plain((*ctx).VPMAXUQ),
	})
	l.scale("divide", "BF16", 2, 1, 4, scaled(bfloat16, (*ctx).VDIVPS))
	l.scale("multiply", "BF16", 2, 1, 4, scaled(bfloat16, (*ctx).VMULPS))
	l.scale("multiply", "I64", 8, 4, 8, plain((*ctx).VPMULLQ))
	return l
}
