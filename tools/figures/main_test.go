package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestDocuments fails if a figure in a document or a picture is not that of the records.
func TestDocuments(t *testing.T) {
	const root = "../.."
	files, err := render(root)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range files {
		got, err := os.ReadFile(filepath.Join(root, name))
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s does not have the figures of the records: run make figures (%v)", name, err)
		}
	}
}

// TestFill replaces what is between the comments, and refuses comments it does not know.
func TestFill(t *testing.T) {
	root := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(filepath.Join(root, name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("docs/benchmarks/c10d-go-x.jsonl", `{"system":"c10d-go","op":"all_reduce","size":1024,"world":2,"time_us_p50":3}
{"system":"c10d-go","op":"all_reduce","size":1024,"world":2,"time_us_p50":2}
{"system":"c10d-go","op":"all_reduce","size":1048576,"world":2,"time_us_p50":1500.4}
{"system":"c10d-go","op":"all_reduce","size":1073741824,"world":2,"time_us_p50":2284400}
`)
	write("docs/benchmarks/openmpi-x.jsonl", `{"system":"openmpi","op":"all_reduce","size":1024,"world":2,"time_us_p50":1}
{"system":"openmpi","op":"all_reduce","size":1048576,"world":2,"time_us_p50":3001}
`)
	write("docs/benchmarks/link-x.jsonl", `{"system":"link","op":"all_reduce","size":1073741824,"world":2,"time_us_p50":2259300}
`)
	write("bench/bars.txt", "# bars\nall_reduce 2,4 1K,1M openmpi 1.5x\nall_reduce 2 1K - 2us\n")
	d := document{root: root, name: "README.md", files: map[string][]byte{}}
	got, err := d.fill([]byte(`<!-- figures table run=x -->
old
<!-- figures end -->
It meets <!-- figures targets run=x of=bars.txt -->none<!-- figures end --> targets.
Ratios: <!-- figures range run=x sizes=1G --><!-- figures end -->.
Alone: <!-- figures time run=x sizes=1K --><!-- figures end -->, <!-- figures time run=x sizes=1M --><!-- figures end -->, ` +
		"<!-- figures rate run=x sizes=1M --><!-- figures end -->" + `.
<!-- figures plot run=x op=all_reduce on="two CPUs" file=r.svg -->
<!-- figures end -->
`))
	want := "<!-- figures table run=x -->\n| size | here | the link alone | ratio | Open MPI | ratio |\n| --- | --- | --- | --- | --- | --- |\n" +
		"| 1 KiB | 2 |  |  | 1 | 0.50x |\n| 1 MiB | 1.5 ms |  |  | 3 ms | 2.0x |\n| 1 GiB | 2.28 s | 2.26 s | 1.0x |  |  |\n<!-- figures end -->\n" +
		"It meets <!-- figures targets run=x of=bars.txt -->2 of 3<!-- figures end --> targets.\n" +
		"Ratios: <!-- figures range run=x sizes=1G -->1.0 to 1.0x<!-- figures end -->.\n" +
		"Alone: <!-- figures time run=x sizes=1K -->2 us<!-- figures end -->, <!-- figures time run=x sizes=1M -->1.5 ms<!-- figures end -->, " +
		"<!-- figures rate run=x sizes=1M -->0.699 GB/s<!-- figures end -->.\n" +
		"<!-- figures plot run=x op=all_reduce on=\"two CPUs\" file=r.svg -->\n![Time over the size, beside its peers: all_reduce](r.svg)\n<!-- figures end -->\n"
	if err != nil || string(got) != want {
		t.Errorf("%v\n%s", err, got)
	}
	for _, want := range []string{"two CPUs", "c10d for Go", "the link alone", "Open MPI", "bus bandwidth", ">1 KiB<", ">1 GiB<"} {
		if !bytes.Contains(d.files["r.svg"], []byte(want)) {
			t.Errorf("the picture does not have %q", want)
		}
	}
	for text, want := range map[string]string{
		"<!-- figures table run=y --><!-- figures end -->":            "no records of this library in run y",
		"<!-- figures table run=x colour=red --><!-- figures end -->": `unknown key "colour"`,
		"<!-- figures range run=x sizes=2K --><!-- figures end -->":   "no case of the run fits",
		"<!-- figures time run=x --><!-- figures end -->":             "3 cases of the run fit, instead of one",
		"<!-- figures poem run=x --><!-- figures end -->":             `unknown figure "poem"`,
		"<!-- figures table run=x -->":                                "each needs an end",
	} {
		if _, err := d.fill([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", text, err)
		}
	}
}
