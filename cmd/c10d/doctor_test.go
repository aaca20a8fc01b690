//go:build unix

package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/credentials"
	"github.com/c10d-go/c10d/internal/must"
)

func TestDoctor(t *testing.T) {
	for _, wire := range []string{"gloo", "auto"} {
		t.Run(wire, func(t *testing.T) {
			p := start(t, nil, "doctor", "-world", "3", "-wire", wire, "-json")
			require.Zero(t, p.wait(), p.stderr.String())
			var d diagnosis
			require.NoError(t, json.Unmarshal([]byte(p.output()), &d))
			require.Len(t, d.Ranks, 3)
			require.Len(t, d.Links, 3)
			for r, p := range d.Ranks {
				require.Equal(t, r, p.Rank)
				require.Equal(t, d.Ranks[0].Groups[0].Wire, p.Groups[0].Wire)
			}
			if wire == "gloo" {
				require.Equal(t, "gloo", d.Ranks[0].Groups[0].Wire)
			}
			for _, l := range d.Links {
				require.Positive(t, l.OneWay)
				require.Positive(t, l.Throughput)
			}
		})
	}
	p := start(t, nil, "doctor", "-world", "2", "-links=false")
	require.Zero(t, p.wait(), p.stderr.String())
	require.Contains(t, p.output(), "rank 0 of 2")
	require.NotContains(t, p.output(), "one way us")
	p = start(t, nil, "doctor", "-wire", "string")
	require.Equal(t, 2, p.wait())
	require.Contains(t, p.stderr.String(), `unknown wire "string"`)
}

// TestDoctorWithSecrets: local ranks use the files that the environment names, as other ranks do.
func TestDoctorWithSecrets(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "secret")
	require.NoError(t, credentials.WriteSecret(secret))
	p := start(t, []string{"C10D_TLS_SECRET=" + secret}, "doctor", "-world", "2", "-links=false", "-device", "cpu", "-timeout", "20s")
	require.Zero(t, p.wait(), p.stderr.String())
	require.Contains(t, p.output(), "all ranks have it, and TLS")
}

// TestDoctorOnSeveralHosts has two hosts of two ranks, which are told what they are.
func TestDoctorOnSeveralHosts(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("memory is shared on Linux only")
	}
	self := must.Get(os.Executable())
	p := start(t, nil, "run", "-n", "4", "--", "sh", "-c", `C10D_HOST=$((RANK / 2)) exec "$0" doctor -device cpu -json`, self)
	require.Zero(t, p.wait(), p.stderr.String())
	var d diagnosis
	text := p.output()
	require.NoError(t, json.Unmarshal([]byte(text[strings.Index(text, "{"):]), &d), text)
	require.Len(t, d.Links, 6)
	for _, l := range d.Links {
		want := "tcp"
		if l.A/2 == l.B/2 {
			want = "shm"
		}
		require.Equal(t, want, l.Over, "%d-%d", l.A, l.B)
	}
	var out bytes.Buffer
	require.NoError(t, d.write(&out))
	require.Regexp(t, `0-1 +shm`, out.String())
	require.Regexp(t, `1-2 +tcp`, out.String())
}

// TestDoctorShowsClusters: the doctor says which ranks form a cluster, what each carries, and that device tensors go
// through the clusters.
func TestDoctorShowsClusters(t *testing.T) {
	self := must.Get(os.Executable())
	for _, wire := range []string{"", "native"} {
		p := start(t, nil, "run", "-n", "3", "-no-prefix", "--", "sh", "-c", `C10D_CLUSTER=$((RANK/2)) exec "$0" doctor -device sim -links=false -wire "$1"`, self, wire)
		require.Zero(t, p.wait(), p.stderr.String())
		require.Regexp(t, `(?s)gloo, rank 0 of 3: native wire.*cluster 0 +rank 0 carries 0.5, rank 1 carries 0.5 of its traffic.*cluster 1 +rank 2 carries 1 of its traffic`, p.output())
		require.Regexp(t, `(?s)cuda, rank 0 of 3: native wire.* all_reduce +any size +clusters .*this rank is in cluster 0 of 2.* reduce +any size +clusters `, p.output())
	}
}

// TestAdviceAboutNCCL: its ranks need one version, wherever it lies.
func TestAdviceAboutNCCL(t *testing.T) {
	ranks := []rankInfo{{NCCL: "2.28.9, /a", CPUs: 9}, {Rank: 1, NCCL: "2.28.9, /b", CPUs: 9}, {Rank: 2, NCCL: "2.21.5, /a", CPUs: 9}, {Rank: 3, CPUs: 9}}
	require.Equal(t, []string{
		"rank 2 has NCCL 2.21.5, rank 0 NCCL 2.28.9: groups of backend nccl need the same version on all ranks",
		"rank 3 has no NCCL, rank 0 NCCL 2.28.9: groups of backend nccl need the same version on all ranks",
	}, advice(ranks))
}

// TestDoctorLooksAtGPUs tells of devices, their links, and a group for tensors on
// them; and where there are none why.
func TestDoctorLooksAtGPUs(t *testing.T) {
	p := start(t, nil, "doctor", "-world", "2", "-device", "sim", "-json", "-links=false")
	require.Zero(t, p.wait(), p.stderr.String())
	var d diagnosis
	require.NoError(t, json.Unmarshal([]byte(p.output()), &d))
	require.Len(t, d.GPUs, 1, "one host")
	h := d.GPUs[0]
	require.Equal(t, "sim", h.Driver)
	require.Empty(t, h.Error)
	require.Len(t, h.Devices, 2)
	require.Len(t, h.Links, 2)
	require.True(t, h.Links[0].Peer)
	require.Equal(t, []string{"direct", "ring", "clusters", "host"}, h.Works)
	for _, r := range d.Ranks {
		require.Equal(t, 2, r.GPUs)
		require.Empty(t, r.NoGroup)
		require.Len(t, r.Groups, 2, "gloo, and cuda")
		require.Equal(t, "cuda", r.Groups[1].Backend)
		require.Equal(t, "direct", r.Groups[1].Choices[0].Algorithm, "of an all_reduce")
	}
	p = start(t, nil, "doctor", "-world", "1", "-device", "sim", "-links=false")
	require.Zero(t, p.wait(), p.stderr.String())
	require.Regexp(t, `(?s)cuda, rank 0 of 1.*all_reduce +any size.*GPUs of host .*, driver sim, implementations of all_reduce: .*simulated GPU`, p.output())

	p = start(t, []string{"C10D_NCCL_LIBRARY=/nowhere/libnccl.so.2"}, "doctor", "-world", "1", "-device", "sim", "-links=false")
	require.Zero(t, p.wait(), p.stderr.String())
	require.Contains(t, p.output(), "no NCCL for rank 0: nccl: NCCL's library cannot be loaded (tried /nowhere/libnccl.so.2)")

	p = start(t, nil, "doctor", "-world", "2", "-device", "sim")
	require.Zero(t, p.wait(), p.stderr.String())
	require.Regexp(t, `registered memory +any size +\d+ of 16 regions `, p.output())

	hidden := []string{"CUDA_VISIBLE_DEVICES=-1"}
	p = start(t, hidden, "doctor", "-world", "1", "-links=false")
	require.Zero(t, p.wait(), p.stderr.String())
	require.Regexp(t, `no GPUs for rank 0: .*no usable device`, p.output())
	p = start(t, hidden, "doctor", "-world", "1", "-device", "cpu")
	require.Zero(t, p.wait(), p.stderr.String())
	require.NotContains(t, p.output(), "GPU")
	p = start(t, hidden, "doctor", "-world", "1", "-device", "cuda")
	require.Equal(t, 1, p.wait())
	require.Contains(t, p.stderr.String(), "c10d doctor: -device cuda: ")
	p = start(t, hidden, "doctor", "-device", "cuda:0")
	require.Equal(t, 2, p.wait())
	require.Contains(t, p.stderr.String(), `-device "cuda:0" is not auto, cpu, cuda or sim`)
}

func TestGPUAdvice(t *testing.T) {
	ranks := []rankInfo{
		{Rank: 0, Host: "a", GPUs: 2}, {Rank: 1, Host: "a", GPUs: 2}, {Rank: 2, Host: "a", GPUs: 2, NoGroup: "out of luck"},
		{Rank: 3, Host: "b", NoGPU: "no driver"}, {Rank: 4, Host: "c", GPUs: 1}, {Rank: 5, Host: "c", GPUs: 1},
	}
	hosts := []hostGPUs{
		{
			Host:    "a",
			Devices: []deviceOf{{Index: 0, CUDA: "12.4", StreamValues: true, Queues: 4}, {Index: 1, CUDA: "13.0"}},
			Links:   []gpuLink{{From: 0, To: 1}, {From: 1, To: 0}},
		},
		{Host: "c", Devices: []deviceOf{{CUDA: "13.0", StreamValues: true, Queues: 32}}, Error: "it burns"},
	}
	all := gpuAdvice(ranks, hosts)
	require.Len(t, all, 8)
	text := strings.Join(all, "\n")
	for _, want := range []string{
		"rank 2 could not join a group for tensors on GPUs: out of luck", "rank 3 has no GPU: no driver",
		"host a has 3 ranks on 2 GPUs", "GPU 1 of host a cannot wait for values", "GPU 1 of host a has a driver for CUDA 13.0, GPU 0 one for 12.4",
		"cannot reach each other's memory, so data between them goes through CPU memory: 0 and 1", "the GPUs of host c cannot be used: it burns",
		"streams of GPU 0 of host a share 4 queues",
	} {
		require.Contains(t, text, want)
	}
	require.Empty(t, gpuAdvice([]rankInfo{{NoGPU: "no driver"}}, nil))
	require.Equal(t, "peer, no atomics, rank 1", gpuLink{Peer: true, Rank: 1}.String())
	require.Equal(t, "host", gpuLink{}.String())
	require.Equal(t, "?", gpuLink{Peer: true, Error: "x"}.String())
}

func TestPairs(t *testing.T) {
	require.Equal(t, [][2]int{{0, 1}, {0, 2}, {1, 2}}, pairs(3))
	require.Len(t, pairs(allPairs), allPairs*(allPairs-1)/2)
	require.Len(t, pairs(100), 100)
	require.Empty(t, pairs(1))
}
