// Package credentials reads the files that protect a job's connections. They are a certificate,
// its key, the certificates of authorities, and a token. The programs c10d store and c10d run
// have a flag for each file. The latter passes the names to its ranks in environment variables,
// which pg.Init reads.
package credentials

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// The environment variables, each with the name of a file.
const (
	CertVariable  = "C10D_TLS_CERT"
	KeyVariable   = "C10D_TLS_KEY"
	CAVariable    = "C10D_TLS_CA"
	TokenVariable = "C10D_TOKEN_FILE"
)

// Files are names of files. The zero value means neither TLS nor token.
type Files struct {
	Cert string // PEM, this process's certificate with those between it and the authority
	Key  string // PEM, its key
	CA   string // PEM, certificates of the authorities that sign the other processes'
	// Token is a secret of the job. White space around it is ignored.
	Token string
}

// FromEnv returns the files that the environment names.
func FromEnv(getenv func(string) string) Files {
	return Files{Cert: getenv(CertVariable), Key: getenv(KeyVariable), CA: getenv(CAVariable), Token: getenv(TokenVariable)}
}

// Flags lets flags change f, whose present values are the defaults.
func (f *Files) Flags(fs *flag.FlagSet) {
	fs.StringVar(&f.Cert, "tls-cert", f.Cert, "PEM `file` with the certificate: speak TLS 1.3, which only Go ranks do ("+CertVariable+")")
	fs.StringVar(&f.Key, "tls-key", f.Key, "PEM `file` with the certificate's key ("+KeyVariable+")")
	fs.StringVar(&f.CA, "tls-ca", f.CA, "PEM `file` with the authorities that sign the others' certificates ("+CAVariable+")")
	fs.StringVar(&f.Token, "token-file", f.Token, "`file` with a secret that clients of the store must know, which only Go ranks do ("+TokenVariable+")")
}

// Environ returns variables with the files' absolute names.
func (f Files) Environ() ([]string, error) {
	var env []string
	for _, v := range []struct{ name, file string }{{CertVariable, f.Cert}, {KeyVariable, f.Key}, {CAVariable, f.CA}, {TokenVariable, f.Token}} {
		if v.file == "" {
			continue
		}
		path, err := filepath.Abs(v.file)
		if err != nil {
			return nil, err
		}
		env = append(env, v.name+"="+path)
	}
	return env, nil
}

// Check returns an error if a server's files are incomplete: a certificate needs a key, a key a
// certificate, and authorities need both.
func (f Files) Check() error {
	switch {
	case (f.Cert == "") != (f.Key == ""):
		return fmt.Errorf("give both -tls-cert and -tls-key, or neither (%s, %s)", CertVariable, KeyVariable)
	case f.CA != "" && f.Cert == "":
		return fmt.Errorf("-tls-ca needs -tls-cert and -tls-key (%s, %s, %s)", CAVariable, CertVariable, KeyVariable)
	}
	return nil
}

// CheckMutual is Check for a process that is a client too: with TLS it needs all
// three files.
func (f Files) CheckMutual() error {
	if f.CA == "" && f.Cert != "" && f.Key != "" {
		return fmt.Errorf("-tls-cert and -tls-key need -tls-ca (%s), the authorities of the ranks' certificates", CAVariable)
	}
	return f.Check()
}

// Load reads the files. The configuration is nil without a certificate. It is for servers and
// clients. With authorities, servers require a certificate from clients.
func (f Files) Load() (*tls.Config, string, error) {
	if err := f.Check(); err != nil {
		return nil, "", err
	}
	var c *tls.Config
	if f.Cert != "" {
		pair, err := tls.LoadX509KeyPair(f.Cert, f.Key)
		if err != nil {
			return nil, "", err
		}
		c = &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS13}
	}
	if f.CA != "" {
		text, err := os.ReadFile(f.CA)
		if err != nil {
			return nil, "", err
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(text) {
			return nil, "", fmt.Errorf("%s holds no certificate in PEM form", f.CA)
		}
		c.RootCAs, c.ClientCAs, c.ClientAuth = pool, pool, tls.RequireAndVerifyClientCert
	}
	token, err := f.token()
	return c, token, err
}

func (f Files) token() (string, error) {
	if f.Token == "" {
		return "", nil
	}
	text, err := os.ReadFile(f.Token)
	if err != nil {
		return "", err
	}
	token := strings.TrimSpace(string(text))
	if token == "" {
		return "", errors.New(f.Token + " holds no token")
	}
	return token, nil
}
