// Package hole has a host name for tests, one of whose addresses drops packets. It works on Linux.
package hole
