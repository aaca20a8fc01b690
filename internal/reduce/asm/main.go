// Command asm writes the AVX2 loops of package reduce: avx2_amd64.s and its
// declarations, avx2_amd64.go.
//
// It is a module of its own, so that the core needs no generator. Its test
// fails when the files in the tree are not what it writes; after a change here,
//
//	go generate ./internal/reduce
//
// A loop consists of a frame, the same for all, which walks over the bytes
// (frame.go), and of an operation, which maps a vector of each operand to a
// vector of results (operations.go).
package main

import (
	"flag"
	"log"
	"os"
	"path/filepath"

	"github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/pass"
	"github.com/mmcloughlin/avo/printer"
)

const name = "avx2_amd64"

func main() {
	log.SetFlags(0)
	log.SetPrefix("asm: ")
	dir := flag.String("dir", "..", "where to write "+name+".s and "+name+".go")
	flag.Parse()
	files, err := generate()
	if err != nil {
		log.Fatal(err)
	}
	for suffix, text := range files {
		if err := os.WriteFile(filepath.Join(*dir, name+suffix), text, 0o666); err != nil {
			log.Fatal(err)
		}
	}
}

// generate returns the assembly, under .s, and its declarations, under .go.
func generate() (map[string][]byte, error) {
	g := &generator{build.NewContext()}
	g.ConstraintExpr("amd64,!purego")
	for _, k := range kernels() {
		g.kernel(k)
	}
	g.hasF16C()
	file, err := g.Result()
	if err != nil {
		return nil, err
	}
	if err := pass.Compile.Execute(file); err != nil {
		return nil, err
	}
	config := printer.Config{Name: "internal/reduce/asm", Pkg: "reduce"}
	assembly, err := printer.NewGoAsm(config).Print(file)
	if err != nil {
		return nil, err
	}
	stubs, err := printer.NewStubs(config).Print(file)
	if err != nil {
		return nil, err
	}
	return map[string][]byte{".s": assembly, ".go": stubs}, nil
}
