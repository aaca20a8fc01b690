package rendezvous

import (
	"errors"
	"fmt"

	"github.com/c10d-go/c10d/store"
)

// perRank reports whether addresses in st have the form of PyTorch up to 2.0. There a rank has an address for each
// other rank, and a connection begins with the first message.
func perRank(st store.Store) bool { return store.IsTorch1(st) }

// parsePerRank reads the address of each other rank.
func parsePerRank(b []byte, size int) (value, error) {
	if len(b) == 0 || len(b)%blobLen != 0 {
		return value{}, fmt.Errorf("%d bytes, which is not the form of a Gloo address", len(b))
	}
	v := value{perRank: true}
	if n := len(b) / blobLen; n != size-1 {
		return v, fmt.Errorf("%d addresses, as for a group of %d ranks, where this group has %d", n, n+1, size)
	}
	for i := range size - 1 {
		e, err := parseBlob(b[i*blobLen:])
		if err != nil {
			return v, err
		}
		if e.seq >= 0 {
			return v, errors.New("numbered addresses, as Gloo does on macOS and Windows, where its messages have another form")
		}
		v.at = append(v.at, e)
	}
	return v, nil
}
