// Package credentials reads the files that protect a job's connections, and makes TLS
// configurations of them. The files are a certificate, its key and the certificates of authorities,
// or one secret that all processes share. The programs c10d store and c10d run
// have a flag for each file. The latter passes the names to its ranks in environment variables,
// which pg.Init reads. Only names are passed: environments and command lines are seen by others.
package credentials

import (
	"crypto/tls"
	"fmt"
	"path/filepath"
)

// The environment variables, each with the name of a file.
const (
	CertVariable   = "C10D_TLS_CERT"
	KeyVariable    = "C10D_TLS_KEY"
	CAVariable     = "C10D_TLS_CA"
	SecretVariable = "C10D_TLS_SECRET"
)

// Files protect a job. They are names of files. Either Cert, Key and CA or Secret switch TLS on. The
// zero value means no TLS.
//
// A file that another user could change is refused: files, links and directories above belong to this
// user or root. Others cannot write to them, except to sticky directories such as /tmp.
// Others than the group cannot read Key and Secret.
type Files struct {
	// Cert is a PEM file with this process's certificate and those between it and the authority. It
	// must be for use on both sides of a connection, and valid for the address at which other
	// processes reach this one.
	Cert string

	// Key is a PEM file with the certificate's key.
	Key string

	// CA is a PEM file with certificates of the authorities that sign the other processes'
	// certificates.
	CA string

	// Secret is a file with one secret of the job, in place of certificates. It has 32 to 4096 bytes
	// that nobody can guess: "c10d certs -secret FILE" makes one. White space around it is ignored.
	// Whoever has the file is a member of the job, from any address.
	Secret string
}

// variables returns the names of the variables and the files' names, by variable.
func (f *Files) variables() []struct {
	name string
	file *string
} {
	return []struct {
		name string
		file *string
	}{{CertVariable, &f.Cert}, {KeyVariable, &f.Key}, {CAVariable, &f.CA}, {SecretVariable, &f.Secret}}
}

// FromEnv returns the files that the environment names.
func FromEnv(getenv func(string) string) Files {
	var f Files
	for _, v := range f.variables() {
		*v.file = getenv(v.name)
	}
	return f
}

// TLS reports whether the files switch TLS on.
func (f Files) TLS() bool { return f.Cert != "" || f.Key != "" || f.CA != "" || f.Secret != "" }

// Environ returns variables with the files' absolute names.
func (f Files) Environ() ([]string, error) {
	var env []string
	for _, v := range f.variables() {
		if *v.file == "" {
			continue
		}
		path, err := filepath.Abs(*v.file)
		if err != nil {
			return nil, err
		}
		env = append(env, v.name+"="+path)
	}
	return env, nil
}

// Check returns an error if a server's files are incomplete: a certificate needs a key, a key a
// certificate, and authorities need both. A secret replaces all three.
func (f Files) Check() error {
	switch {
	case f.Secret != "" && (f.Cert != "" || f.Key != "" || f.CA != ""):
		return fmt.Errorf("give either -tls-secret (%s) or -tls-cert, -tls-key and -tls-ca (%s, %s, %s)", SecretVariable, CertVariable, KeyVariable, CAVariable)
	case (f.Cert == "") != (f.Key == ""):
		return fmt.Errorf("give both -tls-cert and -tls-key, or neither (%s, %s)", CertVariable, KeyVariable)
	case f.CA != "" && f.Cert == "":
		return fmt.Errorf("-tls-ca needs -tls-cert and -tls-key (%s, %s, %s)", CAVariable, CertVariable, KeyVariable)
	}
	return nil
}

// CheckMutual is Check for a process that is a client too: with TLS it needs all
// three files, or the secret.
func (f Files) CheckMutual() error {
	if f.CA == "" && f.Cert != "" && f.Key != "" {
		return fmt.Errorf("-tls-cert and -tls-key need -tls-ca (%s), the authorities of the ranks' certificates", CAVariable)
	}
	return f.Check()
}

// Load reads the files. The configuration is nil without TLS. It is for both sides of the connections
// of this module's packages, which know the name that a server's certificate must have (see ForHost).
// Other clients take the one of Configs. With authorities, or with a secret, servers require a
// certificate from clients.
//
// Certificates, key and authorities are read again when a file has changed, for connections that
// begin later.
func (f Files) Load() (*tls.Config, error) {
	if err := f.Check(); err != nil || !f.TLS() {
		return nil, err
	}
	s, err := f.source()
	if err != nil {
		return nil, err
	}
	return s.config(), nil
}

// Configs returns the configurations of a server, such as one for HTTP, and of its clients. Both are
// nil without TLS. The server requires a certificate of the job. The client trusts the authorities
// that the files have now: call Configs again for later ones.
func (f Files) Configs() (server, client *tls.Config, err error) {
	if err := f.CheckMutual(); err != nil || !f.TLS() {
		return nil, nil, err
	}
	s, err := f.source()
	if err != nil {
		return nil, nil, err
	}
	client = s.config()
	client.GetConfigForClient, client.GetCertificate = nil, nil
	client.VerifyConnection, client.InsecureSkipVerify = nil, false
	return s.config(), client, nil
}
