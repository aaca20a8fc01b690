package backend

import (
	"fmt"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/c10d-go/c10d/internal/bytesize"
)

// Explainer is a backend that can say how it does things, and why so.
type Explainer interface {
	// Explain describes the group as it was made; it waits for nobody.
	Explain() Explanation
}

// Explanation is what a backend has chosen for a group.
type Explanation struct {
	Backend string `json:"backend"`
	Rank    int    `json:"rank"`
	Size    int    `json:"size"`
	Hosts   int    `json:"hosts,omitempty"` // on how many hosts the ranks are, if known
	Wire    string `json:"wire"`            // how the ranks talk: gloo or native
	Why     string `json:"why"`
	Links   []Link `json:"links"` // by rank, without this one

	// DeviceLink is what is between the ranks' devices, as tables of ways have it: peers, neighbours,
	// shared, host or hosts. It is empty for backends without devices, and until the first collective has found out.
	DeviceLink string `json:"device_link,omitempty"`

	// Clusters are ranks that are near each other, if collectives go inside, between and inside
	// them.
	Clusters []Cluster `json:"clusters,omitempty"`

	Choices []Choice `json:"choices"` // by operation, then by size
}

// Link is what is between this rank and another.
type Link struct {
	Rank      int    `json:"rank"`
	Transport string `json:"transport"` // shm, tcp, gloo tcp, ...
	Detail    string `json:"detail,omitempty"`
}

// Cluster is ranks that are near each other, and their parts in the traffic with other clusters.
type Cluster struct {
	Ranks  []int     `json:"ranks"`
	Shares []float64 `json:"shares"` // of the cluster's traffic, by place in Ranks
}

// String returns a line of text.
func (c Cluster) String() string {
	var b strings.Builder
	for i, r := range c.Ranks {
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "rank %d carries %.3g", r, c.Shares[i])
	}
	return b.String()
}

// Choice is how an operation is done up to a size.
type Choice struct {
	Op        string `json:"op"`    // its c10d name
	UpTo      int64  `json:"up_to"` // bytes of a rank's tensors; -1 for any size
	Algorithm string `json:"algorithm"`
	Why       string `json:"why,omitempty"`
}

// String is the explanation for people, of several lines.
func (e Explanation) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s, rank %d of %d: %s wire (%s)\n", e.Backend, e.Rank, e.Size, e.Wire, e.Why)
	if e.DeviceLink != "" {
		fmt.Fprintf(&b, "between the devices: %s\n", e.DeviceLink)
	}
	w := tabwriter.NewWriter(&b, 0, 8, 2, ' ', 0)
	for i := 0; i < len(e.Links); {
		// Ranks in a row with the same link share a line.
		l, j := e.Links[i], i+1
		for j < len(e.Links) && e.Links[j].Transport == l.Transport && e.Links[j].Detail == l.Detail {
			j++
		}
		ranks := strconv.Itoa(l.Rank)
		if j > i+1 {
			ranks += "-" + strconv.Itoa(e.Links[j-1].Rank)
		}
		fmt.Fprintf(w, "  rank %s\t%s\t%s\n", ranks, l.Transport, l.Detail)
		i = j
	}
	for i, c := range e.Clusters {
		fmt.Fprintf(w, "  cluster %d\t%v of its traffic\n", i, c)
	}
	for _, c := range e.Choices {
		size := "any size"
		if c.UpTo >= 0 {
			size = "to " + bytesize.Name(c.UpTo) + " bytes"
		}
		fmt.Fprintf(w, "  %s\t%s\t%s\t%s\n", c.Op, size, c.Algorithm, c.Why)
	}
	w.Flush()
	return b.String()
}
