//go:build !linux

package shm

func (g *Group) moveOffCPU() {}
