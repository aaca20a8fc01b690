package credentials

import (
	"crypto"
	"crypto/ed25519"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"sync"
	"time"

	"github.com/c10d-go/c10d/internal/ownfile"
)

// source has the certificate and the authorities of a process, as its files have them now.
type source struct {
	files Files
	name  string // that servers' certificates must have instead of their address

	mu    sync.Mutex
	read  [3]os.FileInfo // the files that state comes from
	state state
}

type state struct {
	cert  *tls.Certificate
	roots *x509.CertPool // nil without authorities
}

// same reports whether a file has not changed. A renamed file may have the same size and time.
func same(a, b os.FileInfo) bool {
	return a != nil && a.Size() == b.Size() && a.ModTime().Equal(b.ModTime()) && os.SameFile(a, b)
}

func (f Files) source() (*source, error) {
	s := &source{files: f}
	if f.Secret != "" {
		s.name = secretAddress
		secret, err := readSecret(f.Secret, "secret", minSecret)
		if err == nil {
			s.state, err = fromSecret(secret)
		}
		return s, err
	}
	_, err := s.now()
	return s, err
}

// now returns the certificate and the authorities. It reads the files if one has changed. The last ones stay in use
// if files cannot be read, could be changed by another user, or do not fit together, as in the midst of a change.
func (s *source) now() (state, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.files.Secret != "" {
		return s.state, nil
	}
	var read [3]os.FileInfo
	unchanged := s.state.cert != nil
	for i, name := range []string{s.files.Cert, s.files.Key, s.files.CA} {
		if name == "" {
			continue
		}
		info, err := os.Stat(name)
		if err != nil {
			return s.keep(err)
		}
		read[i] = info
		unchanged = unchanged && same(s.read[i], info)
	}
	if unchanged {
		return s.state, nil
	}
	pair, err := load(s.files.Cert, s.files.Key)
	if err != nil {
		return s.keep(fmt.Errorf("%s and %s: %w", s.files.Cert, s.files.Key, err))
	}
	next := state{cert: &pair}
	if s.files.CA != "" {
		text, _, err := ownfile.ReadTrusted(s.files.CA, false)
		if err != nil {
			return s.keep(err)
		}
		next.roots = x509.NewCertPool()
		if !next.roots.AppendCertsFromPEM(text) {
			return s.keep(fmt.Errorf("%s holds no certificate in PEM form", s.files.CA))
		}
	}
	s.state, s.read = next, read
	return next, nil
}

// load reads a certificate and its key. Issue replaces the key first, and its file has the new certificate, too. So a
// process that starts before the certificate is replaced has both.
func load(cert, key string) (tls.Certificate, error) {
	public, before, err := ownfile.ReadTrusted(cert, false)
	if err != nil {
		return tls.Certificate{}, err
	}
	private, now, err := ownfile.ReadTrusted(key, true)
	if err != nil {
		return tls.Certificate{}, err
	}
	pair, err := tls.X509KeyPair(public, private)
	if err != nil && !now.ModTime().Before(before.ModTime()) {
		if both, e := tls.X509KeyPair(private, private); e == nil {
			return both, nil
		}
	}
	return pair, err
}

// keep returns the last state, or err if there is none.
func (s *source) keep(err error) (state, error) {
	if s.state.cert != nil {
		return s.state, nil
	}
	return state{}, err
}

// config returns a configuration for both sides of a connection.
//
// A client checks the server's certificate itself, in VerifyConnection, because RootCAs cannot
// change. It needs the name of the server: see ForHost.
func (s *source) config() *tls.Config {
	first := s.state
	c := &tls.Config{
		MinVersion: tls.VersionTLS13,
		// A ticket would let a client in after its certificate has expired.
		SessionTicketsDisabled: true,
		ServerName:             s.name,
		RootCAs:                first.roots,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			now, err := s.now()
			return now.cert, err
		},
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			now, err := s.now()
			return now.cert, err
		},
	}
	if first.roots == nil {
		return c
	}
	c.ClientCAs, c.ClientAuth = first.roots, tls.RequireAndVerifyClientCert
	server := c.Clone()
	c.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		now, err := s.now()
		if err != nil {
			return nil, err
		}
		its := server.Clone()
		its.ClientCAs = now.roots
		return its, nil
	}
	c.InsecureSkipVerify, c.VerifyConnection = true, s.verify
	return c
}

// verify checks a server's certificate as crypto/tls does.
func (s *source) verify(c tls.ConnectionState) error {
	if c.ServerName == "" {
		return errors.New("credentials: the name of the server is not known")
	}
	if len(c.PeerCertificates) == 0 {
		return errors.New("credentials: the server has sent no certificate")
	}
	now, err := s.now()
	if err != nil {
		return err
	}
	between := x509.NewCertPool()
	for _, cert := range c.PeerCertificates[1:] {
		between.AddCert(cert)
	}
	_, err = c.PeerCertificates[0].Verify(x509.VerifyOptions{
		Roots: now.roots, Intermediates: between, DNSName: c.ServerName, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	})
	if err != nil {
		return &tls.CertificateVerificationError{UnverifiedCertificates: c.PeerCertificates, Err: err}
	}
	return nil
}

// The certificates of processes that share a secret are valid for this address instead of a host. It is
// no name because a ClientHello has a server's name in clear text, and no address. They are valid from
// notBefore on and do not expire: the secret ends with the job.
const secretName, secretAddress = "c10d-job", "0.0.0.0"

var notBefore, notAfter = time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC)

// fromSecret derives the job's authority from the secret, and makes a certificate that it signs, with
// a new key. The authority is the same in every process. Its key never leaves the process.
func fromSecret(secret []byte) (state, error) {
	seed, err := hkdf.Key(sha256.New, secret, nil, "c10d-go job authority, version 1", ed25519.SeedSize)
	if err != nil {
		return state{}, err
	}
	authorityKey := ed25519.NewKeyFromSeed(seed)
	authority, err := sign(&x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: secretName}, NotBefore: notBefore, NotAfter: notAfter,
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}, nil, authorityKey.Public(), authorityKey)
	if err != nil {
		return state{}, err
	}
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return state{}, err
	}
	serial, err := newSerial()
	if err != nil {
		return state{}, err
	}
	leaf, err := sign(&x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: secretName}, IPAddresses: []net.IP{net.ParseIP(secretAddress)},
		NotBefore: notBefore, NotAfter: notAfter, KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: bothSides,
	}, authority, public, authorityKey)
	if err != nil {
		return state{}, err
	}
	roots := x509.NewCertPool()
	roots.AddCert(authority)
	return state{cert: &tls.Certificate{Certificate: [][]byte{leaf.Raw}, PrivateKey: private, Leaf: leaf}, roots: roots}, nil
}

var bothSides = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}

func newSerial() (*big.Int, error) {
	return rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
}

// sign returns a certificate signed by authority, or by itself if that is nil.
func sign(template, authority *x509.Certificate, public crypto.PublicKey, key crypto.Signer) (*x509.Certificate, error) {
	if authority == nil {
		authority = template
	}
	der, err := x509.CreateCertificate(rand.Reader, template, authority, public, key)
	if err != nil {
		return nil, err
	}
	return x509.ParseCertificate(der)
}
