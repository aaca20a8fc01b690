package edges

// Lanes returns how many streams and hosts a tracker knows.
func Lanes(t *Tracker) int { return len(t.lanes) }
