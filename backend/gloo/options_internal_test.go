package gloo

import (
	"reflect"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/testcerts"
)

// TestTCPOptionsReachTheTransport: every field of TCPOptions is a field of the transport's options,
// with the same value.
func TestTCPOptionsReachTheTransport(t *testing.T) {
	o := TCPOptions{TLS: testcerts.Config(t)}
	v := reflect.ValueOf(&o).Elem()
	for i := range v.NumField() {
		switch f := v.Field(i); f.Kind() {
		case reflect.String:
			f.SetString("text")
		case reflect.Bool:
			f.SetBool(true)
		case reflect.Int, reflect.Int64:
			f.SetInt(int64(i + 1))
		}
	}
	got := reflect.ValueOf(o.options())
	for i := range v.NumField() {
		name := v.Type().Field(i).Name
		require.False(t, v.Field(i).IsZero(), name)
		require.Equal(t, v.Field(i).Interface(), got.FieldByName(name).Interface(), name)
	}
}
