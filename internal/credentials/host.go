package credentials

import "crypto/tls"

// ForHost returns the configuration of a client for a connection to host. The server's certificate
// must be valid for c.ServerName or, if that is empty, for host.
//
// crypto/tls keeps a name that is an address from VerifyConnection, so ForHost passes it on.
func ForHost(c *tls.Config, host string) *tls.Config {
	c = c.Clone()
	if c.ServerName == "" {
		c.ServerName = host
	}
	if check := c.VerifyConnection; check != nil {
		name := c.ServerName
		c.VerifyConnection = func(s tls.ConnectionState) error {
			if s.ServerName == "" {
				s.ServerName = name
			}
			return check(s)
		}
	}
	return c
}
