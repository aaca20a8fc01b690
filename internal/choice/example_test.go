package choice_test

import (
	"fmt"
	"strings"

	"github.com/c10d-go/c10d/internal/choice"
	"github.com/c10d-go/c10d/internal/plan"
)

func Example() {
	table, err := choice.Parse(strings.NewReader(`c10d-table 1
command c10d bench -tune
machine two hosts
all_reduce tcp 2 2 1024    direct 12
all_reduce tcp 2 2 1048576 direct 900
all_reduce tcp 2 2 1024    ring   40
all_reduce tcp 2 2 1048576 ring   500
`))
	if err != nil {
		panic(err)
	}
	for _, bytes := range []int64{4096, 512 << 10} {
		c := table.Choose(choice.Query{Op: plan.OpAllReduce, Bytes: bytes, Wire: "tcp", Ranks: 2, Hosts: 2})
		fmt.Println(c.Why)
	}
	// Output:
	// all_reduce of 4096 bytes, 2 ranks: direct takes 14.604µs, next is ring with 41.348µs
	// all_reduce of 524288 bytes, 2 ranks: ring takes 269.775µs, next is direct with 455.565µs
}
