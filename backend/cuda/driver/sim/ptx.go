package sim

import (
	"bytes"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// entryPoint is a kernel as a PTX text declares it.
type entryPoint struct {
	name   string
	params []param
	typed  bool // the text has a list of parameters
}

type param struct{ size, align int }

// Image returns a text that Load takes, with kernels of the given names whose
// parameters are not checked. It is for programs that have no PTX.
func Image(names ...string) []byte {
	var b bytes.Buffer
	b.WriteString(".version 6.4\n.target sm_70\n.address_size 64\n")
	for _, n := range names {
		fmt.Fprintf(&b, ".visible .entry %s\n", n)
	}
	return b.Bytes()
}

var (
	ptxComment = regexp.MustCompile(`(?s)/\*.*?\*/|//[^\n]*`)
	ptxEntry   = regexp.MustCompile(`\.entry\s+([A-Za-z_$%][\w$]*)\s*(\()?`)
	ptxParam   = regexp.MustCompile(`^\.param\s+(?:\.align\s+(\d+)\s+)?\.([a-z]+)(\d+)\s+(?:\.ptr\s+(?:\.\w+\s+)?(?:\.align\s+\d+\s+)?)?[\w$%]+\s*(?:\[\s*(\d+)\s*\])?$`)
)

// text is a PTX text that was read. Nobody changes it.
type text struct {
	image   []byte
	entries []entryPoint
}

// read has the texts of the process. Programs load the same few on many devices.
var read struct {
	sync.RWMutex
	texts []*text
}

// readPTX returns a PTX text, the same one whenever it gets the same bytes.
func readPTX(image []byte) (*text, error) {
	same := func(t *text) bool { return bytes.Equal(t.image, image) }
	read.RLock()
	i := slices.IndexFunc(read.texts, same)
	texts := read.texts
	read.RUnlock()
	if i >= 0 {
		return texts[i], nil
	}
	entries, err := parsePTX(image)
	if err != nil {
		return nil, err
	}
	read.Lock()
	defer read.Unlock()
	if i := slices.IndexFunc(read.texts, same); i >= 0 {
		return read.texts[i], nil
	}
	t := &text{bytes.Clone(image), entries}
	read.texts = append(read.texts, t)
	return t, nil
}

// parsePTX reads the entry points of a PTX text. It reads declarations only,
// and takes what it does not know for an unusable image.
func parsePTX(image []byte) ([]entryPoint, error) {
	text := string(bytes.TrimRight(image, "\x00"))
	if !strings.Contains(text, ".version") || !strings.Contains(text, ".target") {
		return nil, errors.New("no PTX text: it has no .version or no .target")
	}
	text = ptxComment.ReplaceAllString(text, " ")
	var entries []entryPoint
	if n := strings.Count(text, ".entry"); n == 0 || n != len(ptxEntry.FindAllString(text, -1)) {
		return nil, errors.New("no PTX text: it has no entry point, or one without a name")
	}
	for _, m := range ptxEntry.FindAllStringSubmatchIndex(text, -1) {
		e := entryPoint{name: text[m[2]:m[3]], typed: m[4] >= 0}
		if e.typed {
			list, _, closed := strings.Cut(text[m[5]:], ")")
			if !closed {
				return nil, fmt.Errorf("the parameters of %s do not end", e.name)
			}
			for _, p := range strings.Split(list, ",") {
				if p = strings.TrimSpace(p); p == "" {
					continue
				}
				size, err := parseParam(p)
				if err != nil {
					return nil, fmt.Errorf("kernel %s: %w", e.name, err)
				}
				e.params = append(e.params, size)
			}
		}
		entries = append(entries, e)
	}
	return entries, nil
}

func parseParam(text string) (param, error) {
	m := ptxParam.FindStringSubmatch(strings.Join(strings.Fields(text), " "))
	if m == nil {
		return param{}, fmt.Errorf("unknown parameter %q", text)
	}
	bits, err := strconv.Atoi(m[3])
	if err != nil || bits != 8 && bits != 16 && bits != 32 && bits != 64 {
		return param{}, fmt.Errorf("unknown type in parameter %q", text)
	}
	p := param{size: bits / 8, align: bits / 8}
	if m[1] != "" {
		if p.align, err = strconv.Atoi(m[1]); err != nil || p.align < 1 || p.align > 128 || p.align&(p.align-1) != 0 {
			return param{}, fmt.Errorf("unknown alignment in parameter %q", text)
		}
	}
	if m[4] != "" {
		n, err := strconv.Atoi(m[4])
		if err != nil || n < 1 || n > 4096 {
			return param{}, fmt.Errorf("bad length in parameter %q", text)
		}
		p.size *= n
	}
	return p, nil
}
