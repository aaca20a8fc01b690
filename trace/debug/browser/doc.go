// Package browser tests the debug pages in a real browser, Debian's chromium. It is a module of its own
// because it needs packages that drive a browser.
package browser
