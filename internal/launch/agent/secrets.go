package agent

import (
	"path/filepath"

	"github.com/c10d-go/c10d/internal/credentials"
)

// loadSecrets reads the agent's files. If the job asks for TLS and has no files, it makes a secret in the agent's
// directory. Only this user can read that directory, and the agent removes it.
func (a *agent) loadSecrets() (err error) {
	if a.TLS && !a.Secrets.TLS() && a.SecretsDir == "" {
		a.Secrets.Secret = filepath.Join(a.dir, "tls-secret")
		if err := credentials.WriteSecret(a.Secrets.Secret); err != nil {
			return err
		}
	}
	a.tls, err = a.of(credentials.AgentName).Load()
	return err
}

// of returns the files of a process of the job.
func (a *agent) of(name string) credentials.Files {
	if a.SecretsDir != "" {
		return credentials.InDir(a.SecretsDir, name)
	}
	return a.Secrets
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
			if _, err := f.Load(); err != nil {
				return err
			}
		}
	}
	return nil
}
