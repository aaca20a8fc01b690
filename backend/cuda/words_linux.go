package cuda

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
)

// A page is a file without a directory, as a region is: nothing is left of it once no
// process has it, whichever process ends when. Its name begins with the process that made
// it and with that process's number of the file; the rest of it is random.
const pageOwner = 8

func createPage(id [nameLen / 2]byte) (*page, error) {
	m, err := createFile(pageID(id), pageSize, beforePage)
	if err != nil {
		return nil, err
	}
	var pid, fd uint32
	if _, err := fmt.Sscanf(m.name, "%d/%d/", &pid, &fd); err != nil {
		return nil, fmt.Errorf("name of shared memory %q: %w", m.name, err)
	}
	binary.BigEndian.PutUint32(id[:], pid)
	binary.BigEndian.PutUint32(id[4:], fd)
	return &page{bytes: m.bytes, name: hex.EncodeToString(id[:]), forget: m.forget, unmap: m.unmap}, nil
}

func mapPage(id [nameLen / 2]byte) (*page, error) {
	pid, fd := binary.BigEndian.Uint32(id[:]), binary.BigEndian.Uint32(id[4:])
	m, err := openFile(fmt.Sprintf("%d/%d/%s", pid, fd, pageID(id)), pageSize, beforePage)
	if err != nil {
		return nil, err
	}
	return &page{bytes: m.bytes, unmap: m.unmap}, nil
}

func beforePage(call string) error { return before("page " + call) }

// pageID is the random part of a page's name.
func pageID(id [nameLen / 2]byte) string { return hex.EncodeToString(id[pageOwner:]) }
