package launch

import (
	"encoding/json"
	"errors"
	"time"

	"github.com/c10d-go/c10d/internal/ownfile"
)

// FailureVariable names the environment variable by which "c10d run" tells a rank
// where to note why its group failed.
const FailureVariable = "C10D_FAILURE_FILE"

// ScratchVariable names the environment variable by which "c10d run" tells the ranks of a
// node a directory that they share. The launcher removes it when the attempt is over.
const ScratchVariable = "C10D_SCRATCH_DIR"

// DebugVariable names the environment variable with the address of a rank's debug page, and
// DebugTokenVariable the one with the name of a file that has the page's token.
const (
	DebugVariable      = "C10D_DEBUG_ADDR"
	DebugTokenVariable = "C10D_DEBUG_TOKEN_FILE"
)

// Blame is what one rank says about the failure of its group. Ranks are those of
// the whole job.
type Blame struct {
	Time    time.Time `json:"time"`
	Rank    int       `json:"rank"` // who says it
	Peer    int       `json:"peer"` // the rank at fault; -1 if it is not known
	Message string    `json:"message"`
}

// maxNote is more than any Blame or Epoch has.
const maxNote = 8 << 20

// WriteBlame writes b to a file that does not exist: the first failure counts.
func WriteBlame(path string, b Blame) error {
	text, err := json.Marshal(b)
	if err != nil {
		return err
	}
	f, err := ownfile.Create(path)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	return errors.Join(err, f.Close())
}

// ReadBlame reads what WriteBlame wrote.
func ReadBlame(path string) (Blame, error) {
	var b Blame
	text, err := ownfile.Read(path, maxNote)
	if err == nil {
		err = json.Unmarshal(text, &b)
	}
	return b, err
}
