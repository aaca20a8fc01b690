// Package kubernetes has no code. Its manifests run a program as an Indexed Job and as a JobSet, and its
// test decodes them with the types of Kubernetes and JobSet.
package kubernetes
