package launch

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	"github.com/c10d-go/c10d/internal/ownfile"
)

const (
	// ElasticVariable names the environment variable by which "c10d run -elastic" tells the least
	// and the largest number of ranks: "2:4".
	ElasticVariable = "C10D_ELASTIC"

	// JoinVariable names an environment variable. "c10d run -elastic" sets it to "1" when it starts a
	// rank again whose group has been made. The rank then joins the group of the other ranks.
	JoinVariable = "C10D_JOIN"

	// EpochVariable names the environment variable by which "c10d run -elastic" tells a rank where
	// to write the epochs of the default group.
	EpochVariable = "C10D_EPOCH_FILE"
)

// Epoch is what a rank writes when it works in an epoch. The first one is 0. A rank that joins writes its
// number alone before: Epoch is 0 then, and IDs empty. No rank that works in an epoch with the new number can write
// that earlier.
type Epoch struct {
	Epoch int      `json:"epoch"`
	ID    int      `json:"id"`  // its number as a member
	IDs   []int    `json:"ids"` // of all members, by rank
	Left  []Absent `json:"left,omitempty"`
}

// Absent is a member that has left the group.
type Absent struct {
	ID  int    `json:"id"`
	Why string `json:"why"`
}

// WriteEpoch writes e in the place of an earlier one.
func WriteEpoch(path string, e Epoch) error {
	text, err := json.Marshal(e)
	if err != nil {
		return err
	}
	return ownfile.Replace(path, text)
}

// ReadEpoch reads what WriteEpoch wrote.
func ReadEpoch(path string) (e Epoch, err error) {
	text, err := ownfile.Read(path, maxNote)
	if err == nil {
		err = json.Unmarshal(text, &e)
	}
	return e, err
}

// ParseRange reads the least and the largest number of ranks from "2:4". "4" means "4:4".
func ParseRange(text string) (least, most int, err error) {
	low, high, both := strings.Cut(text, ":")
	if !both {
		high = low
	}
	least, err = strconv.Atoi(low)
	if err == nil {
		most, err = strconv.Atoi(high)
	}
	if err != nil || least < 1 || most < least {
		return 0, 0, fmt.Errorf("%q is no range of ranks, such as 2:4", text)
	}
	return least, most, nil
}
