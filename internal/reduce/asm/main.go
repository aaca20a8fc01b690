// Command asm writes the loops of package reduce for amd64 and arm64. Those of AVX2 go
// to avx2_amd64.s, those of AVX-512 to avx512_amd64.s, and those of NEON to
// neon_arm64.s. Their declarations go to the .go files beside them.
//
// It is a module of its own, so that the core needs no generator. Its test
// fails when the files in the tree are not what it writes; after a change here,
//
//	go generate ./internal/reduce
//
// A loop consists of a frame and an operation. The frame (frame.go) is the same for
// all loops: it walks over a multiple of step bytes. The operation (operations.go)
// combines a vector of each operand. For arm64 they are in neon.go and
// neon_operations.go.
package main

import (
	"flag"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"regexp"

	"github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/pass"
	"github.com/mmcloughlin/avo/printer"
)

// upperHalf matches the registers that only AVX-512 has.
var upperHalf = regexp.MustCompile(`\b[XYZ](1[6-9]|[23][0-9])\b`)

// files returns the text of the files: the loops of each level, and their
// declarations.
func files() (map[string][]byte, error) {
	all := make(map[string][]byte)
	for _, f := range []struct {
		name string
		level
		kernels []kernel
	}{
		{"avx2_amd64", avx2, kernelsAVX2()},
		{"avx512_amd64", avx512, kernelsAVX512()},
	} {
		g := &generator{build.NewContext(), f.level}
		g.ConstraintExpr("amd64,!purego")
		for _, k := range f.kernels {
			g.kernel(k)
		}
		if f.level == avx2 {
			g.join(joiner{"joinF32", "adds float32s.", (*ctx).VADDPS})
			g.join(joiner{"joinF64", "adds float64s.", (*ctx).VADDPD})
			g.hasF16C()
			g.uncached()
		}
		file, err := g.Result()
		if err != nil {
			return nil, err
		}
		if err := pass.Compile.Execute(file); err != nil {
			return nil, err
		}
		config := printer.Config{Name: "internal/reduce/asm", Pkg: "reduce"}
		for suffix, p := range map[string]printer.Printer{".s": printer.NewGoAsm(config), ".go": printer.NewStubs(config)} {
			if all[f.name+suffix], err = p.Print(file); err != nil {
				return nil, err
			}
		}
		// The allocator knows 32 registers, and the assembler takes the latter
		// half for leave to encode what it can for AVX-512.
		if r := upperHalf.Find(all[f.name+".s"]); r != nil && f.level == avx2 {
			return nil, fmt.Errorf("%s.s: an operation needs more than 16 registers, for it has got %s", f.name, r)
		}
	}
	var err error
	all["neon_arm64.s"], all["neon_arm64.go"], err = neonFiles()
	return all, err
}

func main() {
	log.SetFlags(0)
	log.SetPrefix("asm: ")
	dir := flag.String("dir", "..", "where to write the files")
	flag.Parse()
	all, err := files()
	if err != nil {
		log.Fatal(err)
	}
	for name, text := range all {
		if err := os.WriteFile(filepath.Join(*dir, name), text, 0o666); err != nil {
			log.Fatal(err)
		}
	}
}
