package redis_test

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/c10d-go/c10d/store/redis"
)

// A wrong URL is refused; the password stays out of the message.
func ExampleNew() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	s, err := redis.New(ctx, "redis://:secret@/database?prefix=job-7")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer s.Close()
	if err := s.Set(ctx, "greeting", []byte("hello")); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	// Output: store: redis: invalid database number: "database"
}
