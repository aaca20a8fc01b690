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

// RecordError tells the launcher why this rank fails, and returns err. It is for the end of a
// rank's main function.
//
//	if err := pg.RecordError(train(ctx)); err != nil {
//		log.Fatal(err)
//	}
//
// It writes err to the file that TORCHELASTIC_ERROR_FILE names, in the form of c10d's
// errors.record decorator. The report of torchrun or "c10d run" then shows it beside those of
// Python ranks. Call it as soon as the rank has failed: torchrun takes the failure with the
// earliest time for the root cause.
//
// It writes nothing without that variable, or for a nil err. Nor does it for one that matches
// context.Canceled: a rank that was told to stop has not failed. If the file cannot be written,
// the returned error says so too.
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
