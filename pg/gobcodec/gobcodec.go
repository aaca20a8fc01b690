// Package gobcodec is a pg.Codec that encodes objects with encoding/gob. It is apart from pg because a
// program that imports encoding/gob has all of it, used or not.
package gobcodec

import (
	"bytes"
	"encoding/gob"
	"fmt"
	"reflect"
)

// Codec encodes values with encoding/gob.
type Codec[T any] struct{}

// New returns a codec for values of one type.
func New[T any]() Codec[T] { return Codec[T]{} }

// Encode returns v as gob. A nil pointer is an error, because gob has none.
func (Codec[T]) Encode(v T) ([]byte, error) {
	for p := reflect.ValueOf(v); p.Kind() == reflect.Pointer; p = p.Elem() {
		if p.IsNil() {
			return nil, fmt.Errorf("gob: a nil pointer of type %v", p.Type())
		}
	}
	var b bytes.Buffer
	err := gob.NewEncoder(&b).Encode(&v)
	return b.Bytes(), err
}

// Decode reads gob.
func (Codec[T]) Decode(b []byte) (v T, err error) {
	return v, gob.NewDecoder(bytes.NewReader(b)).Decode(&v)
}
