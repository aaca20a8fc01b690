package main

import (
	"bytes"
	"image/png"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// plotOf runs the program on one file and returns the plot.
func plotOf(t *testing.T, ending, text string, only only, against string) ([]byte, error) {
	t.Helper()
	dir := t.TempDir()
	in, out := filepath.Join(dir, "in"), filepath.Join(dir, "out"+ending)
	if err := os.WriteFile(in, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := run(out, against, only, []string{in}); err != nil {
		return nil, err
	}
	b, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	return b, nil
}

const records = `{"system":"c10d-go","op":"all_reduce","dtype":"float32","world":4,"bytes":4,"time_us_p50":2,"busbw_GBps":0.002}
{"system":"c10d-go","op":"all_reduce","dtype":"float32","world":4,"bytes":1024,"time_us_p50":3,"busbw_GBps":0.3}
{"system":"c10d-go","op":"all_reduce","dtype":"float32","world":4,"bytes":1024,"time_us_p50":9,"busbw_GBps":0.1}
{"system":"c10d-go","op":"all_reduce","dtype":"float32","world":4,"bytes":1024,"time_us_p50":2,"busbw_GBps":0.5,"alloc":true}
{"system":"c10d-go","work":"device","device":"cuda","op":"all_reduce","dtype":"float32","world":4,"bytes":1024,"time_us_p50":2,"busbw_GBps":0.5}
{"system":"<other> & co","op":"allreduce","dtype":"float32","world":4,"bytes":4,"time_us_p50":0.05,"busbw_GBps":0.2}
{"system":"c10d-go","op":"barrier","dtype":"float32","world":4,"bytes":0,"time_us_p50":2}
{"system":"c10d-go","op":"reduce","dtype":"float32","world":4,"error":"it has none"}
`

// TestRecords: each system, work and kind of memory has a curve.
func TestRecords(t *testing.T) {
	b, err := plotOf(t, ".svg", records, only{}, "")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		">c10d-go<", ">c10d-go alloc<", ">c10d-go device<", ">&lt;other&gt; &amp; co<", "all_reduce of float32, 4 ranks", "all_reduce of float32 on cuda, 4 ranks",
		">1K<", ">10 µs<", ">10 ns<", ">100 MB/s<", "bus bandwidth, higher is better",
	} {
		if !strings.Contains(string(b), want) {
			t.Errorf("no %s in the plot", want)
		}
	}
	if strings.Contains(string(b), "NaN") || strings.Contains(string(b), "barrier") {
		t.Error("the plot has NaN, or an operation without a size")
	}
	d := new(data)
	for _, us := range []float64{9, 3, 5} {
		d.keep(record{System: "a", P50: us})
	}
	if len(d.records) != 1 || d.records[0].P50 != 3 {
		t.Errorf("%v, want the fastest record of a case", d.records)
	}
}

func TestAgainst(t *testing.T) {
	b, err := plotOf(t, ".svg", records, only{op: "all_reduce", ranks: 4}, "c10d-go")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(b), "p50 over that of c10d-go") || strings.Contains(string(b), "bus bandwidth") {
		t.Error("the plot has no ratios")
	}
}

func TestTraining(t *testing.T) {
	const text = `{"training":"4 ranks","title":"digits","steps_per_epoch":2,"steps":[2,1,0.5,0.2],"loss":[1.5,0.3],"accuracy":[0.5,0.9]}
{"training":"one process","title":"digits","steps_per_epoch":2,"loss":[1.5,0.3],"accuracy":[0.5,0.9]}
`
	b, err := plotOf(t, ".png", text, only{}, "")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := png.Decode(bytes.NewReader(b)); err != nil {
		t.Error(err)
	}
	if b, err = plotOf(t, ".svg", text, only{}, ""); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"digits: loss", "4 ranks, each step", "one process", ">90 %<"} {
		if !strings.Contains(string(b), want) {
			t.Errorf("no %s in the plot", want)
		}
	}
}

// TestOddData draws one point, and nothing.
func TestOddData(t *testing.T) {
	for _, text := range []string{
		`{"system":"a","op":"reduce","bytes":1,"time_us_p50":1}`,
		`{"training":"1 rank","loss":[0,-1]}`,
		`{"training":"1 rank","loss":[0.5],"accuracy":[1]}`,
	} {
		b, err := plotOf(t, ".svg", text, only{}, "")
		if err != nil || strings.Contains(string(b), "NaN") {
			t.Errorf("%s: error %v, or the plot has NaN", text, err)
		}
	}
}

func TestRefused(t *testing.T) {
	for _, c := range []struct{ ending, text, against, want string }{
		{".pdf", records, "", "must end in .svg or .png"},
		{".svg", "", "", "no training, and no record"},
		{".svg", "{", "", "in: unexpected EOF"},
		{".svg", "{}", "", "neither a record of c10d bench nor a training"},
		{".svg", records, "nccl", "-against nccl: there are records of"},
	} {
		if _, err := plotOf(t, c.ending, c.text, only{}, c.against); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("error %v, want %s", err, c.want)
		}
	}
	if err := run("x.svg", "", only{}, []string{"none"}); err == nil {
		t.Error("no error for a file that is not there")
	}
}
