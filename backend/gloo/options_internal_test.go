package gloo

import (
	"cmp"
	"reflect"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/c10d-go/c10d/internal/testcerts"
)

// TestOptionsReachTheTransport: the options of the native wire's connections are the transport's, with the same value.
func TestOptionsReachTheTransport(t *testing.T) {
	o := Options{TLS: testcerts.Config(t)}
	v, names := reflect.ValueOf(&o).Elem(), map[string]string{"Address": "Host"}
	fields := []string{"Address", "Silence", "Checksum", "TLS", "Lanes", "Poll"}
	for i, name := range fields {
		switch f := v.FieldByName(name); f.Kind() {
		case reflect.String:
			f.SetString("text")
		case reflect.Bool:
			f.SetBool(true)
		case reflect.Int, reflect.Int64:
			f.SetInt(int64(i + 1))
		}
	}
	got := reflect.ValueOf(o.tcp())
	for _, name := range fields {
		require.False(t, v.FieldByName(name).IsZero(), name)
		require.Equal(t, v.FieldByName(name).Interface(), got.FieldByName(cmp.Or(names[name], name)).Interface(), name)
	}
}
