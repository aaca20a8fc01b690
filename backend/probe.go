package backend

import "time"

// Prober is a backend that can ask the other ranks how far they are. It is for pages and tools that show
// what a group waits for.
type Prober interface {
	// Probe asks them. It returns within half a second on an idle machine, whatever the operations
	// and the other ranks do. The result is empty if the group has ended.
	Probe() Probe
}

// Probe is what a rank knows of the others.
type Probe struct {
	Waits []Wait  `json:"waits,omitempty"` // the oldest collective, and the oldest send or receive, that have not ended
	Links []State `json:"links,omitempty"` // by rank, without this one
}

// Wait is an operation that has not ended, and the ranks that it waits for.
type Wait struct {
	Op    string   `json:"op"`
	Seq   uint64   `json:"seq"`             // as in work.Info
	Text  string   `json:"text"`            // such as "all_reduce waits for rank 2"
	Ranks []int    `json:"ranks,omitempty"` // of the group
	Why   []string `json:"why,omitempty"`   // what is known of each rank
}

// State is the state of the connection with a rank.
type State struct {
	Rank     int           `json:"rank"`
	Answered bool          `json:"answered"`           // it has answered the question
	Left     bool          `json:"left,omitempty"`     // it has closed the group
	Calls    uint64        `json:"calls"`              // collectives that it has issued, if it has answered
	RTT      time.Duration `json:"rtt_ns,omitempty"`   // the median time of the last answers, 0 if it is not known
	Quiet    time.Duration `json:"quiet_ns,omitempty"` // for how long nothing has come from it, 0 if that is not known
	Rate     uint64        `json:"rate,omitempty"`     // bytes a second, to and fro, between the last questions
}
