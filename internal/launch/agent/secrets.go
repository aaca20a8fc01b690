package agent

import (
	"path/filepath"

	"github.com/c10d-go/c10d/internal/credentials"
)

// loadSecrets reads the agent's files. If the job asks for TLS and has no files, it makes a secret, and a
// token of the store if there is none, in the agent's directory. Only this user can read that directory,
// and the agent removes it.
func (a *agent) loadSecrets() (err error) {
	if a.TLS && !a.Secrets.TLS() && a.SecretsDir == "" {
		a.Secrets.Secret = filepath.Join(a.dir, "tls-secret")
		if err := credentials.WriteSecret(a.Secrets.Secret); err != nil {
			return err
		}
		if a.Secrets.Token == "" {
			a.Secrets.Token = filepath.Join(a.dir, "store-token")
			if err := credentials.WriteSecret(a.Secrets.Token); err != nil {
				return err
			}
		}
	}
	a.tls, a.token, err = a.of(credentials.AgentName).Load()
	return err
}

// of returns the files of a process of the job.
func (a *agent) of(name string) credentials.Files {
	f := a.Secrets
	if a.SecretsDir != "" {
		f = credentials.InDir(a.SecretsDir, name)
		f.Token = a.Secrets.Token
	}
	return f
}

// nameSecrets sets the variables that name the ranks' files. It reads them, so that a file that is
// missing is an error here and not of each rank.
func (a *agent) nameSecrets() error {
	a.rankSecrets = make([][]string, a.Procs)
	for local := range a.rankSecrets {
		f := a.of(credentials.RankName(a.base + local))
		env, err := f.Environ()
		if err != nil {
			return err
		}
		a.rankSecrets[local] = env
		if a.SecretsDir != "" {
			if _, _, err := f.Load(); err != nil {
				return err
			}
		}
	}
	return nil
}
