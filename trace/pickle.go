package trace

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
)

// The part of Python's pickle format, protocol 2, that dumps consist of: see pickletools.py.
const (
	opMark       = '('
	opStop       = '.'
	opNone       = 'N'
	opTrue       = 0x88
	opFalse      = 0x89
	opInt1       = 'K' // BININT1
	opInt2       = 'M' // BININT2
	opInt4       = 'J' // BININT
	opLong1      = 0x8a
	opFloat      = 'G' // BINFLOAT
	opText       = 'X' // BINUNICODE
	opShortText  = 0x8c
	opList       = ']'
	opDict       = '}'
	opEmptyTuple = ')'
	opTuple      = 't'
	opTuple1     = 0x85
	opTuple2     = 0x86
	opTuple3     = 0x87
	opAppend     = 'a'
	opAppends    = 'e'
	opSetItem    = 's'
	opSetItems   = 'u'
	opProto      = 0x80
	opFrame      = 0x95
	opMemoize    = 0x94
	opPut        = 'q' // BINPUT
	opPut4       = 'r' // LONG_BINPUT
	opGet        = 'h' // BINGET
	opGet4       = 'j' // LONG_BINGET
)

// pair is an item of a dict. Dicts are written in order.
type pair struct {
	key   string
	value any
}

type (
	dict  []pair
	tuple []any
)

// pickle appends a value: nil, bool, int64, float64, string, []any, tuple or dict.
func pickle(b []byte, v any) []byte {
	switch v := v.(type) {
	case nil:
		return append(b, opNone)
	case bool:
		if v {
			return append(b, opTrue)
		}
		return append(b, opFalse)
	case int64:
		if v == int64(int32(v)) {
			return binary.LittleEndian.AppendUint32(append(b, opInt4), uint32(v))
		}
		return binary.LittleEndian.AppendUint64(append(b, opLong1, 8), uint64(v))
	case float64:
		return binary.BigEndian.AppendUint64(append(b, opFloat), math.Float64bits(v))
	case string:
		v = strings.ToValidUTF8(v, "?") // Python reads no dump with other bytes
		return append(binary.LittleEndian.AppendUint32(append(b, opText), uint32(len(v))), v...)
	case []any:
		b = append(b, opList, opMark)
		for _, x := range v {
			b = pickle(b, x)
		}
		return append(b, opAppends)
	case tuple:
		b = append(b, opMark)
		for _, x := range v {
			b = pickle(b, x)
		}
		return append(b, opTuple)
	case dict:
		b = append(b, opDict, opMark)
		for _, p := range v {
			b = pickle(pickle(b, p.key), p.value)
		}
		return append(b, opSetItems)
	}
	panic(fmt.Sprintf("trace: cannot pickle a %T", v))
}

// A list and a dict are shared by all places of the stack and the memo that have them.
type (
	pylist struct{ items []any }
	pydict struct{ items map[string]any }
	mark   struct{}
)

// unpickle reads a value that consists of what pickle writes, of floats, and of references to
// earlier values. PyTorch's dumps have nothing else. Nothing is executed.
func unpickle(data []byte) (any, error) {
	u := unpickler{r: bytes.NewReader(data)}
	v, err := u.run()
	if err != nil {
		return nil, fmt.Errorf("byte %d of %d: %w", len(data)-u.r.Len(), len(data), err)
	}
	return v, nil
}

type unpickler struct {
	r     *bytes.Reader
	stack []any
	memo  map[uint32]any
}

var errStack = errors.New("the pickle's commands do not fit together")

func (u *unpickler) run() (any, error) {
	u.memo = make(map[uint32]any)
	for {
		op, err := u.r.ReadByte()
		if err != nil {
			return nil, io.ErrUnexpectedEOF
		}
		if op == opStop {
			return u.pop()
		}
		if err := u.step(op); err != nil {
			return nil, err
		}
	}
}

func (u *unpickler) pop() (any, error) {
	if len(u.stack) == 0 {
		return nil, errStack
	}
	v := u.stack[len(u.stack)-1]
	u.stack = u.stack[:len(u.stack)-1]
	return v, nil
}

// since takes what is above the last mark.
func (u *unpickler) since() ([]any, error) {
	for i := len(u.stack) - 1; i >= 0; i-- {
		if _, ok := u.stack[i].(mark); ok {
			items := append([]any(nil), u.stack[i+1:]...)
			u.stack = u.stack[:i]
			return items, nil
		}
	}
	return nil, errStack
}

func (u *unpickler) push(v any) error {
	u.stack = append(u.stack, v)
	return nil
}

// take reads n bytes.
func (u *unpickler) take(n int) ([]byte, error) {
	if n < 0 || n > u.r.Len() {
		return nil, io.ErrUnexpectedEOF
	}
	b := make([]byte, n)
	_, err := io.ReadFull(u.r, b)
	return b, err
}

// number reads n bytes, little-endian.
func (u *unpickler) number(n int) (uint64, error) {
	b, err := u.take(n)
	if err != nil {
		return 0, err
	}
	return binary.LittleEndian.Uint64(append(b, make([]byte, 8-n)...)), nil
}

func (u *unpickler) text(width int) error {
	n, err := u.number(width)
	if err != nil {
		return err
	}
	b, err := u.take(int(n))
	if err != nil {
		return err
	}
	return u.push(string(b))
}

func (u *unpickler) int(width int) error {
	n, err := u.number(width)
	if err != nil {
		return err
	}
	if width == 4 {
		n = uint64(int64(int32(n)))
	}
	return u.push(int64(n))
}

func (u *unpickler) put(width int) error {
	n, err := u.number(width)
	if err != nil {
		return err
	}
	if len(u.stack) == 0 {
		return errStack
	}
	u.memo[uint32(n)] = u.stack[len(u.stack)-1]
	return nil
}

func (u *unpickler) get(width int) error {
	n, err := u.number(width)
	if err != nil {
		return err
	}
	v, ok := u.memo[uint32(n)]
	if !ok {
		return errStack
	}
	return u.push(v)
}

// tuple makes one of the last n values.
func (u *unpickler) tuple(n int) error {
	at := len(u.stack) - n
	if at < 0 {
		return errStack
	}
	t := tuple(append([]any(nil), u.stack[at:]...))
	u.stack = u.stack[:at]
	return u.push(t)
}

// extend adds items to the list on top of the stack.
func (u *unpickler) extend(items []any) error {
	if len(u.stack) > 0 {
		if l, ok := u.stack[len(u.stack)-1].(*pylist); ok {
			l.items = append(l.items, items...)
			return nil
		}
	}
	return errStack
}

// set adds items to the dict on top of the stack.
func (u *unpickler) set(items []any) error {
	if len(u.stack) == 0 || len(items)%2 != 0 {
		return errStack
	}
	d, ok := u.stack[len(u.stack)-1].(*pydict)
	if !ok {
		return errStack
	}
	for i := 0; i < len(items); i += 2 {
		key, ok := items[i].(string)
		if !ok {
			return fmt.Errorf("a dict has a key that is no string")
		}
		d.items[key] = items[i+1]
	}
	return nil
}

// last takes the last n values.
func (u *unpickler) last(n int) []any {
	n = min(n, len(u.stack))
	items := append([]any(nil), u.stack[len(u.stack)-n:]...)
	u.stack = u.stack[:len(u.stack)-n]
	return items
}

func (u *unpickler) step(op byte) error {
	switch op {
	case opProto:
		_, err := u.take(1)
		return err
	case opFrame:
		_, err := u.take(8)
		return err
	case opMark:
		return u.push(mark{})
	case opNone:
		return u.push(nil)
	case opTrue, opFalse:
		return u.push(op == opTrue)
	case opInt1:
		return u.int(1)
	case opInt2:
		return u.int(2)
	case opInt4:
		return u.int(4)
	case opLong1:
		n, err := u.number(1)
		if err != nil {
			return err
		}
		b, err := u.take(int(n))
		if err != nil {
			return err
		}
		var v uint64
		for i, x := range b {
			if i >= 8 {
				return errors.New("a number has more than 64 bits")
			}
			v |= uint64(x) << (8 * i)
		}
		if len(b) > 0 && len(b) < 8 && b[len(b)-1] >= 0x80 {
			v |= math.MaxUint64 << (8 * len(b))
		}
		return u.push(int64(v))
	case opFloat:
		b, err := u.take(8)
		if err != nil {
			return err
		}
		return u.push(math.Float64frombits(binary.BigEndian.Uint64(b)))
	case opText:
		return u.text(4)
	case opShortText:
		return u.text(1)
	case opList:
		return u.push(new(pylist))
	case opDict:
		return u.push(&pydict{make(map[string]any)})
	case opEmptyTuple:
		return u.push(tuple{})
	case opTuple1, opTuple2, opTuple3:
		return u.tuple(int(op-opTuple1) + 1)
	case opAppend:
		return u.extend(u.last(1))
	case opSetItem:
		return u.set(u.last(2))
	case opTuple, opAppends, opSetItems:
		items, err := u.since()
		switch {
		case err != nil:
			return err
		case op == opAppends:
			return u.extend(items)
		case op == opSetItems:
			return u.set(items)
		}
		return u.push(tuple(items))
	case opPut:
		return u.put(1)
	case opPut4:
		return u.put(4)
	case opGet:
		return u.get(1)
	case opGet4:
		return u.get(4)
	case opMemoize:
		if len(u.stack) == 0 {
			return errStack
		}
		u.memo[uint32(len(u.memo))] = u.stack[len(u.stack)-1]
		return nil
	}
	return fmt.Errorf("unknown command %#x: the file is no dump of a flight recorder", op)
}
