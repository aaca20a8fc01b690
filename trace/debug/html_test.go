package debug

import (
	"go/ast"
	"go/parser"
	"go/token"
	"html"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/backend"
	"github.com/c10d-go/c10d/internal/must"
)

// hostile are strings that would change a page if one place did not escape them.
var hostile = []string{
	`<script>alert(1)</script>`, `"><img src=x onerror=alert(1)>`, `' onmouseover='alert(1)`, `" onmouseover="alert(1)`, `" autofocus onfocus=alert(1) x="`,
	`</pre></td></table></style><h1>`, `</title><body>`, `<!--`, `-->`, `&lt;b&gt;`, `&quot;&#34;&`, `%s%!d%%`, "\n", "\\u003cb\\u003e", "<b>\xff\xfe", "\x00<b>",
}

// fill sets all strings below v to text, all numbers to 1 and all flags, and gives slices two elements.
func fill(v reflect.Value, text string) {
	switch v.Kind() {
	case reflect.String:
		v.SetString(text)
	case reflect.Int, reflect.Int64:
		v.SetInt(1)
	case reflect.Uint64:
		v.SetUint(1)
	case reflect.Float64:
		v.SetFloat(1)
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem(), text)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		for i := range 2 {
			fill(v.Index(i), text)
		}
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			return
		}
		for i := range v.NumField() {
			if f := v.Type().Field(i); f.IsExported() || f.Anonymous {
				fill(v.Field(i), text)
			}
		}
	case reflect.Map: // none is shown
	default:
		panic("a field of type " + v.Type().String())
	}
}

// pagesOf are pages in which every string that can come from elsewhere is text.
func pagesOf(text string) map[string]string {
	full := func() (v *rankView) {
		v = new(rankView)
		fill(reflect.ValueOf(v).Elem(), text)
		return v
	}
	computes, idle := full(), full()
	computes.State, computes.Pending = "", nil // its last operation has failed
	computes.Recent[1].State = "failed"
	idle.State, idle.Pending, idle.Recent, idle.Log, idle.frame = "", nil, nil, nil, frame{}
	all, lost := new(jobView), new(jobView)
	fill(reflect.ValueOf(all).Elem(), text)
	all.Ranks[1].Status.Pending, all.Ranks[1].Status.State = nil, ""
	fill(reflect.ValueOf(lost).Elem(), text)
	for i := range lost.Ranks {
		lost.Ranks[i].Status, lost.Ranks[i].Late = nil, i == 0
	}
	pages := make(map[string]string)
	for name, v := range map[string]view{"rank": full(), "rank that computes": computes, "idle rank": idle, "job": all, "job without pages": lost} {
		var d document
		v.write(&d)
		pages[name] = d.text.String()
	}
	return pages
}

// plain is text that needs no escape. It begins with a letter that stays as it is at the begin of a sentence.
const plain = "PLAIN"

// TestHostileText: text from elsewhere is in pages as text, wherever it stands.
func TestHostileText(t *testing.T) {
	known := pagesOf(plain)
	for _, text := range hostile {
		for name, got := range pagesOf(text) {
			if want := strings.ReplaceAll(known[name], plain, html.EscapeString(text)); got != want {
				i := 0
				for i < len(got) && i < len(want) && got[i] == want[i] {
					i++
				}
				t.Errorf("%s with %q: %q, want %q", name, text, got[max(0, i-40):min(len(got), i+40)], want[max(0, i-40):min(len(want), i+40)])
			}
		}
	}
}

// TestPlaces: text from elsewhere stands between tags or in the quotes of an attribute. No address
// begins with it, and no style or script has it.
func TestPlaces(t *testing.T) {
	tag := regexp.MustCompile(`<[^>]*>`)
	quoted := regexp.MustCompile(`="[^"]*"`)
	address := regexp.MustCompile(`(?:href|src|action|formaction)="([^"]*)"`)
	for name, page := range pagesOf(plain) {
		require.Contains(t, page, plain, name)
		require.NotContains(t, page, "%!", name)
		require.Equal(t, 1, strings.Count(page, "<style>"), name)
		_, style, _ := strings.Cut(page, "<style>")
		style, _, _ = strings.Cut(style, "</style>")
		require.NotContains(t, style, plain, name)
		for _, x := range tag.FindAllString(page, -1) {
			require.NotContains(t, quoted.ReplaceAllString(x, ""), plain, name)
			require.NotRegexp(t, `(?i)^<(script|iframe|object|embed|svg|base)|\s(on\w+|style|srcdoc)=`, x, name)
		}
		for _, a := range address.FindAllStringSubmatch(page, -1) {
			require.True(t, strings.HasPrefix(a[1], "?"), "%s: %s", name, a[0])
		}
	}
}

// TestMarkup: no string becomes markup.
func TestMarkup(t *testing.T) {
	names := must.Get(filepath.Glob("*.go"))
	uses := 0
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		files := token.NewFileSet()
		parsed := must.Get(parser.ParseFile(files, name, nil, 0))
		ast.Inspect(parsed, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.Ident:
				if n.Name == "markup" {
					uses++
				}
			case *ast.CallExpr:
				if id, ok := n.Fun.(*ast.Ident); ok && id.Name == "markup" {
					t.Errorf("%s: a conversion: write the HTML as a constant", files.Position(n.Pos()))
				}
			}
			return true
		})
	}
	require.Equal(t, 3, uses, "the type, put and the style: other uses need a look at their safety")
}

// TestLinks: the links of a rank's page below the page of a job lead to the rank.
func TestLinks(t *testing.T) {
	var d document
	v := rankView{Status: new(Status), Job: true, frame: frameOf(httptest.NewRequest(http.MethodGet, "/?rank=1", nil))}
	v.write(&d)
	found := 0
	for _, a := range regexp.MustCompile(`href="([^"]+)"`).FindAllStringSubmatch(d.text.String(), -1) {
		if a[1] == "?" {
			continue // all ranks
		}
		r := httptest.NewRequest(http.MethodGet, "/"+html.UnescapeString(a[1]), nil)
		require.Equal(t, "1", r.URL.Query().Get("rank"), a[1])
		found++
	}
	require.Equal(t, 3, found)
}

// TestLateRank: the page of a rank says that others have called what this one has not.
func TestLateRank(t *testing.T) {
	now := time.Now()
	status := func(idle time.Duration, calls uint64) *Status {
		return &Status{
			Now: now, Recent: []Operation{{Op: "all_reduce", State: "done", Called: now.Add(-idle)}},
			Groups: []Group{{Name: "1", Description: "pair", Ranks: []int{1, 3, 5}, Collectives: 4, Probes: []backend.Probe{{Links: []backend.State{
				{Rank: 0, Answered: true, Calls: 4}, {Rank: 2, Answered: true, Calls: calls},
			}}}}},
		}
	}
	for _, c := range []struct {
		idle  time.Duration
		calls uint64
		level string
	}{
		{time.Minute, 4, levelOK}, {time.Millisecond, 5, levelOK}, {2 * time.Second, 5, levelWaiting}, {time.Minute, 7, levelStuck},
	} {
		v := rankView{Status: status(c.idle, c.calls)}
		v.judge()
		require.Equal(t, c.level, v.Level)
		if c.level == levelOK {
			require.Equal(t, "No operation is pending.", v.Text)
		} else {
			require.Equal(t, `Rank 5 has called collective 4 of group "1" (pair), and this rank has not.`, v.Text)
			require.Contains(t, v.Why[0], "all_reduce, ended ")
		}
	}
}

func TestAgeText(t *testing.T) {
	for d, want := range map[time.Duration]string{
		-time.Second: "0 s", 0: "< 1 µs", 999: "< 1 µs", 1000: "1 µs", 1234 * time.Microsecond: "1.23 ms",
		time.Second: "1.0 s", 3 * time.Minute: "3m0s",
	} {
		require.Equal(t, want, ageText(d))
	}
}
