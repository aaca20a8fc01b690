package credentials_test

import (
	"crypto/tls"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/credentials"
	"github.com/c10d-go/c10d/internal/must"
)

const patience = 10 * time.Second

// issued returns a process's files, made in a directory of its own unless it is given.
func issued(t *testing.T, dir string, until time.Duration, hosts ...string) credentials.Files {
	t.Helper()
	a, _, err := credentials.OpenAuthority(dir)
	require.NoError(t, err)
	require.NoError(t, a.Issue(dir, "rank0", hosts, time.Now().Add(until)))
	return credentials.InDir(dir, "rank0")
}

func secret(t *testing.T) credentials.Files {
	t.Helper()
	path := filepath.Join(t.TempDir(), "secret")
	require.NoError(t, credentials.WriteSecret(path))
	return credentials.Files{Secret: path}
}

func load(t *testing.T, f credentials.Files) *tls.Config {
	t.Helper()
	return must.Get(f.Load())
}

// meet has a client connect to a server at 127.0.0.1, and returns what each says of the handshake.
func meet(t *testing.T, server, client *tls.Config) (atServer, atClient error) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	served := make(chan error, 1)
	go func() {
		c, err := ln.Accept()
		if err == nil {
			defer c.Close()
			c.SetDeadline(time.Now().Add(patience))
			c = tls.Server(c, server)
			if _, err = c.Read(make([]byte, 1)); err == nil {
				_, err = c.Write([]byte("y"))
			}
		}
		served <- err
	}()
	raw, err := net.Dial("tcp", ln.Addr().String())
	require.NoError(t, err)
	defer raw.Close()
	raw.SetDeadline(time.Now().Add(patience))
	c := tls.Client(raw, credentials.ForHost(client, "127.0.0.1"))
	if _, err = c.Write([]byte("x")); err == nil {
		_, err = io.ReadFull(c, make([]byte, 1))
		if err == nil {
			require.Equal(t, uint16(tls.VersionTLS13), c.ConnectionState().Version)
		}
	}
	raw.Close()
	return <-served, err
}

func TestWhoIsLetIn(t *testing.T) {
	job, other := t.TempDir(), t.TempDir()
	good := load(t, issued(t, job, time.Hour, "127.0.0.1", "localhost"))
	shared := secret(t)
	none := load(t, shared).Clone()
	none.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return new(tls.Certificate), nil }
	// A process keeps what it has read. So each case has its own file names.
	certificate := func(dir, name string, until time.Duration, host string) *tls.Config {
		a, _, err := credentials.OpenAuthority(dir)
		require.NoError(t, err)
		require.NoError(t, a.Issue(dir, name, []string{host}, time.Now().Add(until)))
		return load(t, credentials.InDir(dir, name))
	}
	for name, c := range map[string]struct {
		server, client *tls.Config
		want           string // in the error of one side; empty means that they meet
	}{
		"certificates of one job":         {good, good, ""},
		"one secret":                      {load(t, shared), load(t, shared), ""},
		"another authority":               {good, certificate(other, "rank0", time.Hour, "127.0.0.1"), "unknown authority"},
		"a server of another authority":   {certificate(other, "rank1", time.Hour, "127.0.0.1"), good, "unknown authority"},
		"an expired client":               {good, certificate(job, "old", -time.Minute, "127.0.0.1"), "expired"},
		"an expired server":               {certificate(job, "old2", -time.Minute, "127.0.0.1"), good, "expired"},
		"a server with a wrong name":      {certificate(job, "wrong", time.Hour, "10.1.2.3"), good, "10.1.2.3, not 127.0.0.1"},
		"another secret":                  {load(t, secret(t)), load(t, shared), "unknown authority"},
		"no certificate":                  {load(t, shared), none, "certificate required"},
		"a certificate where secrets are": {load(t, shared), good, "not 127.0.0.1"},
	} {
		t.Run(name, func(t *testing.T) {
			atServer, atClient := meet(t, c.server, c.client)
			if c.want == "" {
				require.NoError(t, atServer)
				require.NoError(t, atClient)
				return
			}
			require.Error(t, atServer)
			require.Error(t, atClient)
			require.Contains(t, atServer.Error()+" "+atClient.Error(), c.want)
		})
	}
}

// A configuration in use follows its files: a new certificate, and then a new authority.
func TestFilesAreReadAgain(t *testing.T) {
	dir := t.TempDir()
	f := issued(t, dir, -time.Minute, "127.0.0.1")
	c := load(t, f)
	good := func() {
		atServer, atClient := meet(t, c, c)
		require.NoError(t, atServer)
		require.NoError(t, atClient)
	}
	require.ErrorContains(t, must.Err(meet(t, c, c)), "expired")
	issued(t, dir, time.Hour, "127.0.0.1")
	good()

	require.NoError(t, os.WriteFile(f.Key, []byte("half of a k"), 0o600))
	good() // the last ones stay in use

	next := t.TempDir()
	fresh := issued(t, next, time.Hour, "127.0.0.1")
	for from, to := range map[string]string{fresh.CA: f.CA, fresh.Key: f.Key, fresh.Cert: f.Cert} {
		require.NoError(t, os.WriteFile(to, must.Get(os.ReadFile(from)), 0o600))
	}
	good()
	atServer, _ := meet(t, c, load(t, fresh))
	require.NoError(t, atServer)
}

// Configs are for servers and clients of other protocols, here HTTP.
func TestConfigs(t *testing.T) {
	f := issued(t, t.TempDir(), time.Hour, "127.0.0.1")
	server, client, err := f.Configs()
	require.NoError(t, err)
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, r.TLS.PeerCertificates[0].Subject.CommonName)
	}))
	s.TLS = server
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.StartTLS()
	defer s.Close()
	get := func(c *tls.Config) (_ string, err error) {
		defer must.Catch(&err)
		t := &http.Transport{TLSClientConfig: c}
		defer t.CloseIdleConnections()
		r := must.Get((&http.Client{Transport: t, Timeout: patience}).Get(s.URL))
		defer r.Body.Close()
		b, err := io.ReadAll(r.Body)
		return string(b), err
	}
	who, err := get(client)
	require.NoError(t, err)
	require.Equal(t, "rank0", who)
	stranger := client.Clone()
	stranger.GetClientCertificate = nil
	require.ErrorContains(t, must.Err(get(stranger)), "certificate required")
	_, other, err := secret(t).Configs()
	require.NoError(t, err)
	require.Error(t, must.Err(get(other)))

	server, client, err = credentials.Files{}.Configs()
	require.NoError(t, err)
	require.Nil(t, server)
	require.Nil(t, client)
}

// A secret or token that is short, or that everybody can read, is refused, and no error repeats it.
func TestSecretFiles(t *testing.T) {
	for name, c := range map[string]struct {
		text          string
		mode          os.FileMode
		secret, token string // errors; "" means none
	}{
		"short":    {"hunter2-hunter2\n", 0o600, "a secret of 15 bytes, want 32 to 4096", "a token of 15 bytes, want 16 to 4096 that nobody can guess: make one with c10d certs -secret FILE"},
		"for both": {"hunter2-hunter2-hunter2-hunter2-\n", 0o600, "", ""},
		"medium":   {"hunter2-hunter2-", 0o600, "a secret of 16 bytes", ""},
		"empty":    {"", 0o600, "a secret of 0 bytes", "a token of 0 bytes"},
		"long":     {strings.Repeat("hunter2", 1000), 0o600, "want 32 to 4096", "want 16 to 4096"},
		"readable": {strings.Repeat("hunter2", 10), 0o644, "can be read by every user", "can be read by every user"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "s")
			require.NoError(t, os.WriteFile(path, []byte(c.text), c.mode))
			_, badSecret := credentials.Files{Secret: path}.Load()
			token, badToken := credentials.LoadToken(path)
			require.True(t, badToken != nil || string(token) == strings.TrimSpace(c.text))
			for err, want := range map[error]string{badSecret: c.secret, badToken: c.token} {
				if want == "" {
					require.NoError(t, err)
					continue
				}
				require.ErrorContains(t, err, path)
				require.ErrorContains(t, err, want)
				require.NotContains(t, err.Error(), "hunter2")
			}
		})
	}
	f := secret(t)
	require.Equal(t, os.FileMode(0o600), must.Get(os.Stat(f.Secret)).Mode().Perm())
	require.Error(t, credentials.WriteSecret(f.Secret), "it exists")
	token, err := credentials.LoadToken(f.Secret)
	require.NoError(t, err, "it serves as a token")
	require.NoError(t, credentials.CheckToken(token))
	_, err = credentials.Files{Secret: f.Secret, CA: "ca.pem"}.Load()
	require.ErrorContains(t, err, "give either -tls-secret")
}

// A certificate that would outlive its authority is refused. It would end with it.
func TestNoLongerThanTheAuthority(t *testing.T) {
	dir := t.TempDir()
	a, _, err := credentials.OpenAuthority(dir)
	require.NoError(t, err)
	err = a.Issue(dir, "rank0", []string{"127.0.0.1"}, time.Now().AddDate(11, 0, 0))
	require.ErrorContains(t, err, "the authority in "+dir+" is valid until ")
	require.NoFileExists(t, filepath.Join(dir, "rank0-key.pem"))
	require.NoError(t, a.Issue(dir, "rank0", []string{"127.0.0.1"}, time.Now().AddDate(9, 0, 0)))
}

// If a key cannot be replaced, its certificate stays.
func TestRenewalFails(t *testing.T) {
	dir := t.TempDir()
	f := issued(t, dir, time.Hour, "127.0.0.1")
	before := must.Get(os.ReadFile(f.Cert))
	require.NoError(t, os.Remove(f.Key))
	require.NoError(t, os.MkdirAll(f.Key+"/occupied", 0o700))
	a, _, err := credentials.OpenAuthority(dir)
	require.NoError(t, err)
	require.Error(t, a.Issue(dir, "rank0", []string{"127.0.0.1"}, time.Now().Add(2*time.Hour)))
	require.Equal(t, before, must.Get(os.ReadFile(f.Cert)))
}

// A directory keeps its authority, and its keys are for this user only.
func TestAuthority(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "certs")
	_, made, err := credentials.OpenAuthority(dir)
	require.NoError(t, err)
	require.True(t, made)
	before, err := os.ReadFile(filepath.Join(dir, "ca.pem"))
	require.NoError(t, err)
	_, made, err = credentials.OpenAuthority(dir)
	require.NoError(t, err)
	require.False(t, made)
	require.Equal(t, before, must.Get(os.ReadFile(filepath.Join(dir, "ca.pem"))))
	for name, mode := range map[string]os.FileMode{"ca-key.pem": 0o600, "ca.pem": 0o644} {
		require.Equal(t, mode, must.Get(os.Stat(filepath.Join(dir, name))).Mode().Perm())
	}
}

// foreign gives a file, directory or link to another user.
func foreign(t *testing.T, path string) {
	if os.Geteuid() != 0 {
		t.Skip("only root can give files to other users")
	}
	require.NoError(t, os.Lchown(path, 4242, -1))
}

// In a directory that somebody else can write to or replace, the authority may be somebody else's. A
// secret there may, too. No file and no directory is made.
func TestForeignDirectory(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("the mode does not say who can write")
	}
	for name, spoil := range map[string]func(t *testing.T, dir string) string{ // returns what the error says
		"everybody can write": func(t *testing.T, dir string) string {
			require.NoError(t, os.Chmod(dir, 0o777))
			return dir + " can be written by every user"
		},
		"everybody can rename it": func(t *testing.T, dir string) string {
			require.NoError(t, os.Chmod(filepath.Dir(dir), 0o777))
			return filepath.Dir(dir) + " can be written by every user"
		},
		"another user's": func(t *testing.T, dir string) string {
			foreign(t, dir)
			return dir + " belongs to another user (uid 4242)"
		},
		"below another user's": func(t *testing.T, dir string) string {
			foreign(t, filepath.Dir(dir))
			return filepath.Dir(dir) + " belongs to another user (uid 4242)"
		},
		"another user's link": func(t *testing.T, dir string) string {
			require.NoError(t, os.Chmod(filepath.Dir(dir), os.ModeSticky|0o777))
			require.NoError(t, os.Rename(dir, dir+"-target"))
			require.NoError(t, os.Symlink(dir+"-target", dir))
			foreign(t, dir)
			return dir + " belongs to another user (uid 4242)"
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "dir")
			require.NoError(t, os.Mkdir(dir, 0o755))
			want := spoil(t, dir)
			_, _, err := credentials.OpenAuthority(dir)
			require.ErrorContains(t, err, want)
			_, _, err = credentials.OpenAuthority(filepath.Join(dir, "further"))
			require.ErrorContains(t, err, want)
			require.ErrorContains(t, credentials.WriteSecret(filepath.Join(dir, "secret")), want)
			require.Empty(t, must.Get(os.ReadDir(dir)))
		})
	}
}

// Files that another user could change are refused, in all roles.
func TestForeignFiles(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("files have no owner")
	}
	dir := t.TempDir()
	all := issued(t, dir, time.Hour, "127.0.0.1")
	load(t, all)
	for name, path := range map[string]string{"cert": all.Cert, "key": all.Key, "CA": all.CA} {
		t.Run(name, func(t *testing.T) {
			info, err := os.Stat(path)
			require.NoError(t, err)
			defer os.Chmod(path, info.Mode())
			require.NoError(t, os.Chmod(path, info.Mode()|0o002))
			require.ErrorContains(t, must.Err(all.Load()), path+" can be ")
			require.NoError(t, os.Chmod(path, info.Mode()))
			foreign(t, path)
			defer os.Chown(path, 0, -1)
			require.ErrorContains(t, must.Err(all.Load()), path+" belongs to another user (uid 4242)")
			require.ErrorContains(t, must.Err(credentials.Files{Secret: path}.Load()), path)
		})
	}
	load(t, all)
	t.Run("directory", func(t *testing.T) {
		foreign(t, dir)
		_, err := all.Load()
		require.ErrorContains(t, err, dir+" belongs to another user (uid 4242)")
		_, _, err = all.Configs()
		require.ErrorContains(t, err, dir+" belongs to another user (uid 4242)")
	})
}

// An authority that somebody else could have put in the place of the job's is not taken later either. Its
// owner could let himself in.
func TestForeignAuthorityLater(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("the mode does not say who can write")
	}
	f := issued(t, t.TempDir(), time.Hour, "127.0.0.1")
	c := load(t, f)
	stranger := issued(t, t.TempDir(), time.Hour, "127.0.0.1")
	text, err := os.ReadFile(stranger.CA)
	require.NoError(t, err)
	require.NoError(t, os.Chmod(f.CA, 0o666))
	require.NoError(t, os.WriteFile(f.CA, text, 0o666))
	require.Error(t, must.Err(meet(t, c, load(t, stranger))))
	atServer, atClient := meet(t, c, c)
	require.NoError(t, atServer)
	require.NoError(t, atClient)
	require.NoError(t, os.Chmod(f.CA, 0o644))
	_, atClient = meet(t, c, c)
	require.ErrorContains(t, atClient, "unknown authority", "its owner has put it there")
}

// hello returns the first bytes that a client sends, and the name of the server in them.
func hello(t *testing.T, client *tls.Config) (sent []byte, name string) {
	near, far := net.Pipe()
	defer near.Close()
	defer far.Close()
	go tls.Client(near, client).Handshake()
	read := &recorder{Conn: far}
	far.SetDeadline(time.Now().Add(patience))
	tls.Server(read, &tls.Config{GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
		name = h.ServerName
		require.Empty(t, h.SupportedProtos)
		return nil, io.EOF
	}}).Handshake()
	return read.sent, name
}

type recorder struct {
	net.Conn
	sent []byte
}

func (r *recorder) Read(b []byte) (int, error) {
	n, err := r.Conn.Read(b)
	r.sent = append(r.sent, b[:n]...)
	return n, err
}

// The first message of a handshake is in clear text. That of a job with a secret says neither what the job
// is nor the name of a host.
func TestClientHello(t *testing.T) {
	c := load(t, secret(t))
	_, further, err := secret(t).Configs()
	require.NoError(t, err)
	for _, c := range []*tls.Config{c, further, credentials.ForHost(c, "node1.example"), credentials.ForHost(further, "node1.example")} {
		sent, name := hello(t, c)
		require.Empty(t, name)
		require.Greater(t, len(sent), 100)
		for _, word := range []string{"c10d", "job", "node1", "example"} {
			require.NotContains(t, string(sent), word)
		}
	}
	_, name := hello(t, credentials.ForHost(load(t, issued(t, t.TempDir(), time.Hour, "node1.example")), "node1.example"))
	require.Equal(t, "node1.example", name, "certificates are for hosts")
}

// TestStartBetweenTwoFiles: a process starts while its certificate is renewed, when one of the two files is new.
func TestStartBetweenTwoFiles(t *testing.T) {
	dir := t.TempDir()
	f := issued(t, dir, time.Hour, "127.0.0.1")
	old := must.Get(os.ReadFile(f.Cert))
	was, err := os.Stat(f.Cert)
	require.NoError(t, err)
	issued(t, dir, time.Hour, "127.0.0.1")
	require.NoError(t, os.WriteFile(f.Cert, old, 0o644))
	require.NoError(t, os.Chtimes(f.Cert, was.ModTime(), was.ModTime()))
	c := load(t, f)
	atServer, atClient := meet(t, c, c)
	require.NoError(t, atServer)
	require.NoError(t, atClient)

	// Somebody else's certificate in its place is an error.
	later := time.Now().Add(time.Hour)
	require.NoError(t, os.Chtimes(f.Cert, later, later))
	require.ErrorContains(t, must.Err(f.Load()), "private key does not match public key")
}
