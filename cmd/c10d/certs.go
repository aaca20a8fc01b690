package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/c10d-go/c10d/internal/credentials"
)

func init() {
	register(command{name: "certs", summary: "make the certificates of a job's processes, or a secret", example: "c10d certs -secret job.secret", setup: setupCerts})
}

// made is a file for -json.
type made struct {
	Event string     `json:"event"`
	File  string     `json:"file"`
	Until *time.Time `json:"until,omitempty"`
}

func setupCerts(flags *flag.FlagSet) func(stdio, []string) (int, error) {
	dir := flags.String("dir", "certs", "`directory` of the certificates; its authority is made once and used again")
	n := flags.Int("n", 1, "certificates for `n` ranks: rank0.pem, rank1.pem and so on")
	hosts := flags.String("hosts", "localhost,127.0.0.1,::1", "names and addresses of the job's `hosts` at which processes reach each other; commas separate them")
	valid := flags.Duration("valid", 90*24*time.Hour, "`duration` for which the certificates are valid")
	secret := flags.String("secret", "", "make this `file` with a secret instead, for -tls-secret")
	asJSON := flags.Bool("json", false, "print a JSON line for each file")

	return func(std stdio, args []string) (int, error) {
		say := func(m made, text string) error {
			m.Event = "made"
			if *asJSON {
				return json.NewEncoder(std.out).Encode(m)
			}
			_, err := fmt.Fprintln(std.out, text)
			return err
		}
		names := strings.FieldsFunc(*hosts, func(r rune) bool { return r == ',' || r == ' ' })
		for i := range names {
			names[i] = unbracketed(names[i])
			if strings.ContainsAny(names[i], ":/") && net.ParseIP(names[i]) == nil {
				return 0, usagef("-hosts: %q is neither a name nor an address: give hosts without ports", names[i])
			}
		}
		switch {
		case len(args) > 0:
			return 0, usagef("unexpected argument %q", args[0])
		case *n < 0 || *n > 1<<16:
			return 0, usagef("-n %d: want 0 to 65536 ranks", *n)
		case *valid <= 0:
			return 0, usagef("-valid %v: must be above 0", *valid)
		case len(names) == 0:
			return 0, usagef("-hosts names no host")
		}
		if *secret != "" {
			if err := credentials.WriteSecret(*secret); err != nil {
				return 1, err
			}
			return 0, say(made{File: *secret}, *secret+": a secret; copy it to every host of the job, readable by its user only")
		}
		a, fresh, err := credentials.OpenAuthority(*dir)
		if err != nil {
			return 1, err
		}
		if fresh {
			file := credentials.InDir(*dir, "ca").Cert
			if err := say(made{File: file}, file+": the job's authority; keep ca-key.pem off the ranks' hosts"); err != nil {
				return 1, err
			}
		}
		until := time.Now().Add(*valid).Truncate(time.Second)
		all := []string{credentials.AgentName}
		for r := range *n {
			all = append(all, credentials.RankName(r))
		}
		for _, name := range all {
			if err := a.Issue(*dir, name, names, until); err != nil {
				return 1, err
			}
			file := credentials.InDir(*dir, name).Cert
			if err := say(made{File: file, Until: &until}, fmt.Sprintf("%s: valid until %s", file, until.Format(time.DateTime))); err != nil {
				return 1, err
			}
		}
		return 0, nil
	}
}

// secretFlags lets flags change f, whose present values are the defaults.
func secretFlags(fs *flag.FlagSet, f *credentials.Files) {
	fs.StringVar(&f.Cert, "tls-cert", f.Cert, "PEM `file` with the certificate: speak TLS 1.3, which only Go ranks do ("+credentials.CertVariable+")")
	fs.StringVar(&f.Key, "tls-key", f.Key, "PEM `file` with the certificate's key ("+credentials.KeyVariable+")")
	fs.StringVar(&f.CA, "tls-ca", f.CA, "PEM `file` with the authorities that sign the others' certificates ("+credentials.CAVariable+")")
	fs.StringVar(&f.Secret, "tls-secret", f.Secret, "`file` with a secret of the job, in place of certificates ("+credentials.SecretVariable+")")
}
