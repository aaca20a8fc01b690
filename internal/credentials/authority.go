package credentials

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/c10d-go/c10d/internal/ownfile"
)

// The names of files in a directory of certificates. A process called NAME has NAME.pem and
// NAME-key.pem.
const (
	caName    = "ca"
	AgentName = "agent" // the launcher's agents
)

// RankName returns the name of a rank's files.
func RankName(rank int) string { return "rank" + strconv.Itoa(rank) }

// InDir returns the files of a process in a directory of certificates.
func InDir(dir, name string) Files {
	return Files{Cert: certFile(dir, name), Key: keyFile(dir, name), CA: certFile(dir, caName)}
}

func certFile(dir, name string) string { return filepath.Join(dir, name+".pem") }
func keyFile(dir, name string) string  { return filepath.Join(dir, name+"-key.pem") }

// authorityYears is how long the authority of a directory is valid.
const authorityYears = 10

// Authority signs the certificates of a job.
type Authority struct {
	cert *x509.Certificate
	key  crypto.Signer
}

// OpenAuthority returns the authority of a directory. It makes directory and authority if there are
// none, and reports that. A directory in which another user could have put one, or could put one later,
// is refused.
func OpenAuthority(dir string) (a *Authority, made bool, err error) {
	err = ownfile.CheckTrusted(dir) // before a directory is made behind somebody's link
	if err == nil {
		err = os.MkdirAll(dir, 0o755)
	}
	if err == nil {
		err = ownfile.CheckTrusted(dir)
	}
	if err != nil {
		return nil, false, err
	}
	if _, err := os.Stat(certFile(dir, caName)); errors.Is(err, fs.ErrNotExist) {
		now := time.Now()
		err := issue(dir, caName, nil, &x509.Certificate{
			Subject: pkix.Name{CommonName: "c10d job authority"}, NotBefore: now.Add(-skew), NotAfter: now.AddDate(authorityYears, 0, 0),
			IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true, KeyUsage: x509.KeyUsageCertSign,
		})
		if err != nil {
			return nil, false, err
		}
		made = true
	}
	pair, err := load(certFile(dir, caName), keyFile(dir, caName))
	if err != nil {
		return nil, false, fmt.Errorf("the authority in %s: %w", dir, err)
	}
	if !pair.Leaf.IsCA {
		return nil, false, fmt.Errorf("%s is not the certificate of an authority", certFile(dir, caName))
	}
	key, ok := pair.PrivateKey.(crypto.Signer)
	if !ok {
		return nil, false, fmt.Errorf("%s has a key that cannot sign", keyFile(dir, caName))
	}
	return &Authority{pair.Leaf, key}, made, nil
}

// skew is how far the clocks of hosts may differ.
const skew = 5 * time.Minute

// Issue makes or replaces the certificate and the key of a process in a directory. The certificate is
// valid for hosts, which are names and addresses, and until a time. Processes that use the files
// read them again.
//
// Nobody accepts a certificate after its authority has expired, so until may not be later than that.
func (a *Authority) Issue(dir, name string, hosts []string, until time.Time) error {
	if until.After(a.cert.NotAfter) {
		return fmt.Errorf("the authority in %s is valid until %s, and the certificate would be until %s: choose a shorter time, or make a new authority in another directory",
			dir, a.cert.NotAfter.Local().Format(time.DateTime), until.Local().Format(time.DateTime))
	}
	c := &x509.Certificate{
		Subject: pkix.Name{CommonName: name}, NotBefore: earlier(time.Now(), until).Add(-skew), NotAfter: until,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: bothSides,
	}
	for _, h := range hosts {
		if ip := net.ParseIP(h); ip != nil {
			c.IPAddresses = append(c.IPAddresses, ip)
		} else {
			c.DNSNames = append(c.DNSNames, h)
		}
	}
	return issue(dir, name, a, c)
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// issue writes a certificate with a new key, signed by a, or by itself if that is nil.
func issue(dir, name string, a *Authority, template *x509.Certificate) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	if template.SerialNumber, err = newSerial(); err != nil {
		return err
	}
	var cert *x509.Certificate
	if a == nil {
		cert, err = sign(template, nil, key.Public(), key)
	} else {
		cert, err = sign(template, a.cert, key.Public(), a.key)
	}
	if err != nil {
		return err
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	// Two files cannot be replaced at once. The file of the key has the certificate, too: see load.
	text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Raw})
	if err := ownfile.Replace(keyFile(dir, name), append(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}), text...)); err != nil {
		return err
	}
	if err := ownfile.Replace(certFile(dir, name), text); err != nil {
		return err
	}
	return os.Chmod(certFile(dir, name), 0o644)
}
