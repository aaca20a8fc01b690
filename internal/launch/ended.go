package launch

// EndedKey is the key of the ranks' store under which "c10d run" tells, in JSON, which rank's process was the first to
// end for good. Ranks that wait for it in pg.Init fail then.
const EndedKey = "c10d-go/ended"

// Ended is a rank whose process has ended, and that is not started again.
type Ended struct {
	Rank int    `json:"rank"`
	Size int    `json:"size"` // of the job
	How  string `json:"how"`  // "rank 1 (pid 7 on host a) ended with exit code 0"
}
