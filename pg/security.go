package pg

import "github.com/c10d-go/c10d/internal/credentials"

// Security names the files that protect a job: Cert, Key and CA, or Secret, and Token. Its method
// Configs returns TLS configurations for further servers of the job, and for their clients.
//
// "c10d certs" makes the files. docs/security.md says what each of them protects.
type Security = credentials.Files
