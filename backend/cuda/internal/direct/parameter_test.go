package direct

import (
	"os"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend/cuda/internal/window"
	"github.com/c10d-go/c10d/internal/must"
)

// cStruct is a structure of a .cu file: where its fields begin, by name, and its length.
type cStruct struct {
	at          map[string]int
	size, align int
}

// cStructs returns the structures of a source by C's rules, as far as they have fields only.
func cStructs(t *testing.T, source string, counts map[string]int) map[string]cStruct {
	all := map[string]cStruct{}
	sizes := map[string]int{"u8": 1, "u16": 2, "u32": 4, "u64": 8}
	field := regexp.MustCompile(`^(?:const )?(\w+) (.+)$`)
	name := regexp.MustCompile(`^(\*?)(\w+)(?:\[(\w+)\])?$`)
	comment := regexp.MustCompile(`//[^\n]*`)
	for _, m := range regexp.MustCompile(`struct (Peer|Call|Span|Move|Spread|Ring) \{([^}]*)\};`).FindAllStringSubmatch(comment.ReplaceAllString(source, ""), -1) {
		x := cStruct{at: map[string]int{}, align: 1}
		for _, line := range strings.Split(m[2], ";") {
			if line = strings.TrimSpace(line); line == "" {
				continue
			}
			f := field.FindStringSubmatch(line)
			require.NotNil(t, f, line)
			for _, d := range strings.Split(f[2], ",") {
				n := name.FindStringSubmatch(strings.TrimSpace(d))
				require.NotNil(t, n, line)
				size, align := sizes[f[1]], sizes[f[1]]
				if s, ok := all[f[1]]; ok {
					size, align = s.size, s.align
				}
				if n[1] == "*" {
					size, align = 8, 8
				}
				require.NotZero(t, size, line)
				x.size = (x.size + align - 1) / align * align
				x.at[n[2]] = x.size
				if n[3] != "" {
					size *= counts[n[3]]
				}
				x.size, x.align = x.size+size, max(x.align, align)
			}
		}
		x.size = (x.size + x.align - 1) / x.align * x.align
		all[m[1]] = x
	}
	return all
}

// TestParameters: the parameters lie in Go as they do in the kernels' sources.
func TestParameters(t *testing.T) {
	for file, structs := range map[string][]any{
		"direct.cu": {window.Peer{}, Call{}, Span{}, Move{}, Spread{}},
		"ring.cu":   {Ring{}},
	} {
		b := must.Get(os.ReadFile(file))
		source := string(b)
		if file == "ring.cu" {
			source = "struct Span { u64 at, bytes; };\n" + source
		}
		all := cStructs(t, source, map[string]int{"maxRanks": window.MostRanks, "mostRanks": window.MostRingRanks})
		renamed := map[string]string{"Call": "c", "padding": "pad", "Off": "at", "N": "bytes"}
		for _, x := range structs {
			typ := reflect.TypeOf(x)
			c := all[typ.Name()]
			require.EqualValues(t, c.size, typ.Size(), typ.Name())
			fields := 0
			for i := range typ.NumField() {
				f := typ.Field(i)
				if f.Name == "_" {
					continue
				}
				name, ok := renamed[f.Name]
				if !ok {
					name = strings.ToLower(f.Name[:1]) + f.Name[1:]
				}
				at, ok := c.at[name]
				require.True(t, ok, "%s of %s in %s", name, typ.Name(), file)
				require.EqualValues(t, at, f.Offset, "%s of %s", name, typ.Name())
				fields++
			}
			require.Len(t, c.at, fields, typ.Name())
			require.Contains(t, source+"static_assert(sizeof(Peer) == 24,static_assert(sizeof(Span) == 16,", "static_assert(sizeof("+typ.Name()+") == "+strconv.Itoa(c.size)+",")
		}
	}
}

// TestPlaces: a place is told in 64 bits, and no place is the first byte of no region.
func TestPlaces(t *testing.T) {
	p := At(3, 1<<30+7)
	require.Equal(t, 3, p.Region())
	require.Equal(t, 1<<30+7, p.Off())
	require.Zero(t, Place(0).Region())
	require.Equal(t, uint64(3)<<48|1<<30|7, uint64(p))
}
