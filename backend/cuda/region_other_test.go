//go:build !linux

package cuda_test

// lonely is for systems whose processes share no memory.
const lonely = true
