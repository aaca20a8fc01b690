package main

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/freeport"
	"github.com/c10d-go/c10d/internal/must"
)

// TestRunTLS has c10d run protect a job with a secret of its own, with a secret of two nodes, and with
// certificates for each rank.
func TestRunTLS(t *testing.T) {
	dir := t.TempDir()
	certs, secret := filepath.Join(dir, "certs"), filepath.Join(dir, "secret")
	p := start(t, nil, "certs", "-dir", certs, "-n", "3", "-hosts", "127.0.0.1,localhost")
	require.Zero(t, p.wait(), p.stderr.String())
	require.Contains(t, p.output(), "rank2.pem: valid until")
	p = start(t, nil, "certs", "-secret", secret)
	require.Zero(t, p.wait(), p.stderr.String())

	programs := map[string]*program{"tls": runRanks(t, "-n 3 -tls", "sockets", "env:C10D_TLS_SECRET")}
	for name, flags := range map[string]string{"secret": "-tls-secret " + secret, "dir": "-tls-dir " + certs} {
		for n, p := range nodes(t, flags, "sockets", "env:C10D_TLS_CERT") {
			programs[fmt.Sprint(name, n)] = p
		}
	}
	for name, p := range programs {
		require.Zero(t, p.wait(), "%s: %s", name, p.stderr.String())
		require.Contains(t, p.output(), "wire native: all ranks have it, and TLS", name)
		require.NotContains(t, p.output(), "socket false", "%s: nothing leaves the host", name)
	}
	require.Contains(t, programs["dir1"].lines, "[rank2] C10D_TLS_CERT="+filepath.Join(certs, "rank2.pem"))
	path := strings.TrimPrefix(programs["tls"].await(1, "C10D_TLS_SECRET=")[0], "[rank0] C10D_TLS_SECRET=")
	require.NoFileExists(t, path, "the secret ends with the job")

	p = runRanks(t, "-n 1 -tls -nnodes 2 -master-addr 127.0.0.1 -master-port 1", "env:RANK")
	require.Equal(t, exitUsage, p.wait())
	require.Contains(t, p.stderr.String(), "give -tls-secret FILE")
	p = runRanks(t, "-n 4 -tls-dir "+certs, "env:RANK")
	require.Equal(t, 1, p.wait())
	require.Contains(t, p.stderr.String(), "rank3.pem: no such file")
}

// TestCertsHosts: hosts are names and addresses. A port would make a certificate that fits nobody.
func TestCertsHosts(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "certs")
	p := start(t, nil, "certs", "-dir", dir, "-hosts", "[::1],node1")
	require.Zero(t, p.wait(), p.stderr.String())
	pair := must.Get(tls.LoadX509KeyPair(filepath.Join(dir, "rank0.pem"), filepath.Join(dir, "rank0-key.pem")))
	require.NoError(t, pair.Leaf.VerifyHostname("::1"))
	require.NoError(t, pair.Leaf.VerifyHostname("node1"))
	for _, host := range []string{"node1:29500", "127.0.0.1:29500", "https://node1"} {
		p = start(t, nil, "certs", "-dir", dir, "-hosts", host)
		require.Equal(t, exitUsage, p.wait())
		require.Contains(t, p.stderr.String(), "give hosts without ports")
	}
	// A call for each host makes certificates that are valid for that host only, of one authority.
	authority := must.Get(os.ReadFile(filepath.Join(dir, "ca.pem")))
	p = start(t, nil, "certs", "-dir", dir, "-hosts", "node2")
	require.Zero(t, p.wait(), p.stderr.String())
	pair = must.Get(tls.LoadX509KeyPair(filepath.Join(dir, "rank0.pem"), filepath.Join(dir, "rank0-key.pem")))
	require.NoError(t, pair.Leaf.VerifyHostname("node2"))
	require.Error(t, pair.Leaf.VerifyHostname("node1"))
	roots := x509.NewCertPool()
	require.True(t, roots.AppendCertsFromPEM(authority))
	must.Get(pair.Leaf.Verify(x509.VerifyOptions{Roots: roots, DNSName: "node2"}))

	p = start(t, nil, "certs", "-dir", dir, "-valid", "200000h")
	require.Equal(t, 1, p.wait())
	require.Contains(t, p.stderr.String(), "choose a shorter time")
}

// TestForeignCerts: the launcher takes no certificates or secrets of another user, not even as root,
// and makes none in another user's directory.
func TestForeignCerts(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can give files to other users")
	}
	above := t.TempDir()
	dir, secret := filepath.Join(above, "certs"), filepath.Join(above, "secret")
	p := start(t, nil, "certs", "-dir", dir)
	require.Zero(t, p.wait(), p.stderr.String())
	p = start(t, nil, "certs", "-secret", secret)
	require.Zero(t, p.wait(), p.stderr.String())
	refused := func(path string) {
		t.Helper()
		for _, flags := range []string{"run -n 1 -tls-dir " + dir + " -- true", "run -n 1 -tls-secret " + secret + " -- true", "certs -dir " + dir} {
			p := start(t, nil, strings.Fields(flags)...)
			if strings.HasPrefix(dir, path) && strings.Contains(flags, dir) || strings.HasPrefix(secret, path) && strings.Contains(flags, secret) {
				require.Equal(t, 1, p.wait(), flags)
				require.Contains(t, p.stderr.String(), path+" belongs to another user (uid 4242), who could change it")
			} else {
				require.Zero(t, p.wait(), p.stderr.String())
			}
		}
	}
	for _, path := range []string{dir, secret, above} {
		require.NoError(t, os.Chown(path, 4242, -1))
		refused(path)
		require.NoError(t, os.Chown(path, 0, -1))
	}
	refused("nothing")
}

// TestSecretsAreShownNowhere looks for secrets in what other users and log files see of a job: command
// lines, environments, output, the report of a failure.
func TestSecretsAreShownNowhere(t *testing.T) {
	p := runRanks(t, "-json -n 2 -tls", "sockets", "env:C10D_TLS_SECRET", "hold")
	pids := numbers(t, p.await(2, "pid"))
	_, path, _ := strings.Cut(p.await(2, "C10D_TLS_SECRET=")[0], "=")
	secret := must.Get(os.ReadFile(path))
	info := must.Get(os.Stat(path))
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm())
	info = must.Get(os.Stat(filepath.Dir(path)))
	require.Equal(t, os.FileMode(0o700), info.Mode().Perm())
	hidden := []string{strings.TrimSpace(string(secret)), "correct-horse-battery"}
	seen := make(map[string]string)
	for _, pid := range append(pids, p.cmd.Process.Pid) {
		for _, file := range []string{"cmdline", "environ"} {
			text := must.Get(os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, file)))
			seen[fmt.Sprint(pid, " ", file)] = string(text)
		}
	}
	require.NoError(t, p.cmd.Process.Signal(syscall.SIGTERM))
	p.wait()
	seen["output"], seen["errors"] = p.output(), p.stderr.String()

	wrong := filepath.Join(t.TempDir(), "wrong")
	require.NoError(t, os.WriteFile(wrong, []byte("correct-horse-battery\n"), 0o600))
	p = runRanks(t, "-n 1 -tls-secret "+wrong, "env:RANK")
	require.Equal(t, 1, p.wait())
	require.Contains(t, p.stderr.String(), "a secret of 21 bytes")
	seen["a short secret"] = p.stderr.String()
	for where, text := range seen {
		for _, s := range hidden {
			require.NotContains(t, text, s, where)
		}
	}
}

// TestANodeWithoutTLS has the launcher of one node speak clear text. It is refused, and says why.
func TestANodeWithoutTLS(t *testing.T) {
	t.Parallel()
	secret := filepath.Join(t.TempDir(), "secret")
	p := start(t, nil, "certs", "-secret", secret)
	require.Zero(t, p.wait(), p.stderr.String())
	_, port, err := net.SplitHostPort(freeport.Loopback(t))
	require.NoError(t, err)
	flags := "-nnodes 2 -rdzv-timeout 15s -master-addr 127.0.0.1 -master-port " + port
	good := runRanks(t, "-node-rank 0 -tls-secret "+secret+" "+flags, "env:RANK")
	plain := runRanks(t, "-node-rank 1 "+flags, "env:RANK")
	require.Equal(t, 1, plain.wait())
	require.Contains(t, plain.stderr.String(), "the server speaks TLS, and this side does not")
	require.Equal(t, 1, good.wait())
	require.Contains(t, good.stderr.String(), "not all 2 nodes came within 15s")
	require.Contains(t, good.stderr.String(), "waiting for node 1 of 2")
}
