package launch

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/must"
)

// TestHost: what people write as an address, in the environment of each launcher.
func TestHost(t *testing.T) {
	for text, want := range map[string]string{
		"node1": "node1", " 127.0.0.1 ": "127.0.0.1", "127.0.0.1\r": "127.0.0.1", "node1\n": "node1", "[::1]": "::1", "[::1]\r\n": "::1",
		"::1": "::1", "fe80::1%1": "fe80::1%1", "[fe80::1%1]": "fe80::1%1", "n_1-2.example.": "n_1-2.example.",
		"1234567890": "1234567890", "rechner-ü": "rechner-ü", "3com.com": "3com.com",
	} {
		got, err := Host("X", text)
		require.NoError(t, err, "%q", text)
		require.Equal(t, want, got, "%q", text)
	}
	for text, want := range map[string]string{
		"node1:29500":       `X="node1:29500" has a port: give the host alone, and the port as MASTER_PORT`,
		"[::1]:29500":       `X="[::1]:29500" has a port: give the host alone, and the port as MASTER_PORT`,
		"tcp://node1:29500": `X="tcp://node1:29500" is a URL: give the host alone, and the port as MASTER_PORT`,
		"a b":               `X="a b" is no host name and no IP address`,
		"":                  `X="" is no host name and no IP address`,
		" ":                 `X=" " is no host name and no IP address`,
		"[::1":              `X="[::1" is no host name and no IP address`,
		"[node1]x":          `X="[node1]x" is no host name and no IP address`,
		"\"node1\"":         `X="\"node1\"" is no host name and no IP address`,
		"10.0.0.256":        `X="10.0.0.256" is no host name and no IP address`,
		"10.0.0":            `X="10.0.0" is no host name and no IP address`,
		"a..b":              `X="a..b" is no host name and no IP address`,
		"--rank=0":          `X="--rank=0" is no host name and no IP address`,
		"a.-b":              `X="a.-b" is no host name and no IP address`,
		"node1,node2":       `X="node1,node2" is no host name and no IP address`,
		"$HOST":             `X="$HOST" is no host name and no IP address`,
		"fe80::1%nosuch":    `X="fe80::1%nosuch": this host has no interface "nosuch"`,
		"::1::2":            `X="::1::2" is no host name and no IP address`,
	} {
		require.EqualError(t, must.Err(Host("X", text)), want)
	}
	_, err := Host("-master-addr", "node1:29500")
	require.EqualError(t, err, `-master-addr="node1:29500" has a port: give the host alone, and the port with -master-port`)
	_, err = Host("X", strings.Repeat("a.", 150)+"a")
	require.ErrorContains(t, err, "is no host name")

	for name, others := range map[string]string{
		"MASTER_ADDR":        "RANK=0 WORLD_SIZE=1 MASTER_PORT=29500",
		"PET_MASTER_ADDR":    "PET_NODE_RANK=0 PET_NNODES=1 PET_MASTER_PORT=29500",
		"PET_RDZV_ENDPOINT":  "PET_NODE_RANK=0 PET_NNODES=1",
		"LWS_LEADER_ADDRESS": "LWS_WORKER_INDEX=0 LWS_GROUP_SIZE=1",
		"JOBSET_COORDINATOR": "JOBSET_NAME=a JOB_COMPLETION_INDEX=0 WORLD_SIZE=1",
	} {
		with := func(value string) func(string) string {
			return func(v string) string {
				if v == name {
					return value
				}
				return environ(others)(v)
			}
		}
		e, err := Detect(with("[::1] \r"))
		require.NoError(t, err, name)
		addr, err := e.Address()
		require.NoError(t, err, name)
		require.Equal(t, "[::1]:29500", addr, name)
		require.ErrorContains(t, must.Err(Detect(with("tcp://a:1"))), name+`="tcp://a:1" is a URL`)
		require.ErrorContains(t, must.Err(Detect(with("a b"))), name+`="a b" is no host name and no IP address`)
	}
}
