package pg

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"
)

// RecordError writes err to TORCHELASTIC_ERROR_FILE: call it last.
func RecordError(err error) error {
	return recordError(err, os.Getenv, time.Now())
}

func recordError(err error, getenv func(string) string, now time.Time) error {
	const variable = "TORCHELASTIC_ERROR_FILE"
	path := getenv(variable)
	if err == nil || path == "" || errors.Is(err, context.Canceled) {
		return err
	}
	// torchrun fails itself on a timestamp that is missing or no whole number.
	// Without a py_callstack it shows the message.
	var f struct {
		Message struct {
			Message   string `json:"message"`
			ExtraInfo struct {
				Timestamp string `json:"timestamp"`
			} `json:"extraInfo"`
		} `json:"message"`
	}
	f.Message.Message = err.Error()
	f.Message.ExtraInfo.Timestamp = strconv.FormatInt(now.Unix(), 10)
	text, failed := json.Marshal(f)
	if failed == nil {
		failed = os.WriteFile(path, text, 0o644)
	}
	if failed != nil {
		return errors.Join(err, fmt.Errorf("pg: %s: %w", variable, failed))
	}
	return err
}
