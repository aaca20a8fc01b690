package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/bytesize"
	"github.com/c10d-go/c10d/internal/choice"
	"github.com/c10d-go/c10d/internal/plan"
)

func simulateOutput(t *testing.T, args string) string {
	t.Helper()
	var out, errs bytes.Buffer
	require.Zero(t, dispatch(stdio{&out, &errs}, strings.Fields("simulate "+args)), errs.String())
	require.Empty(t, errs.String())
	return out.String()
}

func TestSimulateJSON(t *testing.T) {
	records := make(map[string]simulated)
	for line := range strings.Lines(simulateOutput(t, "-json -op all_reduce,all_gather -algorithm ring -ranks 4,8 -b 4K -e 64K -f 16 -latency 9us -overhead 500ns -bandwidth 8Gbit")) {
		var r simulated
		require.NoError(t, json.Unmarshal([]byte(line), &r))
		require.Equal(t, "tools simulate", r.System)
		require.Equal(t, "ring", r.Algorithm)
		require.Equal(t, r.World, r.Hosts)
		require.InDelta(t, r.Formula, r.Time, 0.01)
		require.Equal(t, r.Formula, r.Ring)
		records[r.Op+" "+bytesize.Name(int(r.Bytes))+" "+string(rune('0'+r.World))] = r
	}
	require.Len(t, records, 8)
	r := records["all_reduce 64K 8"]
	// 14 messages of 8 KiB at 1 GB/s, 10 us each, and 7 reductions at 10 GB/s.
	require.InDelta(t, 14*(10+8.192)+7*0.8192, r.Time, 0.01)
	require.EqualValues(t, 14*8, r.Messages)
	require.EqualValues(t, 14<<16, r.Sent)
	require.EqualValues(t, 14<<13, r.LinkMax)
	require.InDelta(t, 14<<13, r.LinkMean, 0)
	require.EqualValues(t, 7*8, records["all_gather 64K 8"].Messages)
	require.EqualValues(t, 7<<16, records["all_gather 64K 8"].Sent)
}

// TestSimulateLargeFactor: the size after the last one may be more than an integer holds.
func TestSimulateLargeFactor(t *testing.T) {
	out := simulateOutput(t, "-json -algorithm ring -ranks 4 -b 4 -e 8 -f 4611686018427387904")
	require.Equal(t, 1, strings.Count(out, "\n"), out)
}

func TestSimulateTable(t *testing.T) {
	out := simulateOutput(t, "-op all -ranks 6 -per-host 2,3 -b 1K -e 1K")
	for _, op := range plan.Ops() {
		require.Contains(t, out, "# "+op.String()+" on a model: latency 10µs")
		for _, a := range plan.Algorithms(op) {
			require.Contains(t, out, " "+a.Name+" ", op.String())
		}
	}
	require.Contains(t, out, "     6      3 ")
	require.Contains(t, out, "     6      2 ")
	require.NotContains(t, out, "     6      6 ")
}

func TestSimulateOptions(t *testing.T) {
	times := func(args string) (r simulated) {
		require.NoError(t, json.Unmarshal([]byte(simulateOutput(t, "-json -algorithm binomial -ranks 16 -b 1M -e 1M "+args)), &r))
		return r
	}
	plain := times("")
	require.Greater(t, times("-late 1s -stragglers 1").Time, 1e6)
	require.Greater(t, times("-jitter 1ms -seed 4").Time, plain.Time)
	require.Greater(t, times("-slow 3 -stragglers 16").Time, plain.Time)
	require.Greater(t, times("-eager 1K").Time, plain.Time)
	require.Less(t, times("-hosts 1 -memory 0 -local-bandwidth 100G").Time, plain.Time)
	require.Zero(t, times("-hosts 1").Remote)
	require.Equal(t, 3, times("-hosts 3").Hosts)
	require.Equal(t, plain.Time, times("-op all_reduce -nics 2").Time)
	require.Equal(t, "chain:4096", times("-op broadcast -algorithm chain -chunk 4K").Algorithm)
	require.Less(t, times("-op broadcast -algorithm chain -chunk 64K").Time, times("-op broadcast -algorithm chain -chunk 1M").Time)
}

// TestSimulateMakesTables has a table made, read and asked.
func TestSimulateMakesTables(t *testing.T) {
	text := simulateOutput(t, "-op all -ranks 4,16 -per-host 1,4 -b 1K -e 1M -f 1024 -table")
	table, err := choice.Parse(strings.NewReader(text))
	require.NoError(t, err)
	require.Contains(t, table.Command(), "tools simulate -b=1K -e=1M -f=1024 -op=all -per-host=1,4 -ranks=4,16 -table=true")
	require.Contains(t, table.Machine(), "latency 10µs")
	for _, op := range plan.Ops() {
		if len(plan.Algorithms(op)) == 1 {
			require.NotContains(t, text, "\n"+op.String()+" ")
			continue
		}
		var all []simulated
		bytes := int64(1 << 20)
		for line := range strings.Lines(simulateOutput(t, "-json -per-host 4 -ranks 16 -b 1M -e 1M -op "+op.String())) {
			var r simulated
			require.NoError(t, json.Unmarshal([]byte(line), &r))
			all = append(all, r)
		}
		if op != plan.OpAllReduce && op != plan.OpReduce && op != plan.OpBroadcast {
			bytes /= 16
		}
		got := table.Choose(choice.Query{Op: op, Bytes: bytes, Ranks: 16, Hosts: 4})
		for _, r := range all {
			require.LessOrEqual(t, micro(got.Time), r.Time, "%v: %s; %s", op, got.Why, r.Algorithm)
		}
		ordered := table.Choose(choice.Query{Op: op, Bytes: bytes, Ranks: 16, Hosts: 4, RankOrder: true})
		require.Positive(t, ordered.Time, ordered.Why)
	}
}

func TestSimulateUsage(t *testing.T) {
	for args, want := range map[string]string{
		"x":                                     `unexpected argument "x"`,
		"-op all_to_none":                       `no collective "all_to_none"`,
		"-algorithm none":                       `no algorithm "none" of all_reduce`,
		"-ranks 8,x":                            "is not a list of numbers such as 8,64,512",
		"-ranks 0":                              "is not a list of numbers such as 8,64,512",
		"-ranks 100000":                         "100000 ranks, want 1 to 65536",
		"-hosts 9 -ranks 8":                     "-hosts 9: more than 8 ranks",
		"-hosts 2 -per-host 2":                  "-hosts excludes -per-host",
		"-b 2K -e 1K":                           "-b must not exceed -e",
		"-bandwidth fast":                       `"fast" is not a bandwidth`,
		"-bandwidth -1":                         "is not a bandwidth",
		"-bandwidth 0.1":                        "a bandwidth of 0.1 bytes a second",
		"-latency -1s":                          "a latency of -1e+09, want 0 or more",
		"-root 8 -ranks 8":                      "-root 8 is not within 8 ranks",
		"-stragglers 9 -ranks 8":                "9 stragglers among 8 ranks",
		"-json -table":                          "-json excludes -table",
		"-elem 0":                               "-elem must be at least 1",
		"-op reduce -algorithm ring -ranks 512": `no algorithm "ring" of reduce`,
	} {
		var out, errs bytes.Buffer
		require.Equal(t, exitUsage, dispatch(stdio{&out, &errs}, strings.Fields("simulate "+args)), args)
		require.Contains(t, errs.String(), want, args)
	}
	var out, errs bytes.Buffer
	free := "simulate -table -ranks 2 -b 4 -e 4 -latency 0 -overhead 0 -bandwidth 0 -reduce-bandwidth 0 -copy-bandwidth 0"
	require.Equal(t, 1, dispatch(stdio{&out, &errs}, strings.Fields(free)))
	require.Contains(t, errs.String(), "no case takes any time")
}

func TestRate(t *testing.T) {
	for text, want := range map[string]float64{"0": 0, "12.5G": 12.5e9, "100Gbit": 12.5e9, "400m": 4e8, "8bit": 1, "1T": 1e12} {
		var r rate
		require.NoError(t, r.Set(text))
		require.InDelta(t, want, float64(r), 1e-6, text)
		var back rate
		require.NoError(t, back.Set(r.String()))
		require.InDelta(t, want, float64(back), 1e-6, text)
	}
	for _, text := range []string{"", "G", "bit", "-1", "NaN", "1e30", "5X"} {
		var r rate
		require.Error(t, r.Set(text), text)
	}
}
