package shm

// MoveOffCPU has the calling rank move to another CPU, if one of the others was last seen on its own.
func (g *Group) MoveOffCPU() { g.moveOffCPU() }

// CPUOf returns the word with the CPU, plus one, on which a rank was last seen.
func (g *Group) CPUOf(rank int) *uint32 { return g.cpuOf(rank) }
