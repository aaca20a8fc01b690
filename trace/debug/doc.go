// Package debug shows what a rank does on a page for a browser. The page has the rank's groups,
// connections and routes, and the last lines of the log. It has the operations that have not ended, and
// says which ranks they wait for. Buttons take a dump of the recorder and the stacks of goroutines.
//
// A program that imports this package has the page, as with net/http/pprof:
//
//	import _ "github.com/c10d-go/c10d/trace/debug"
//
// pg.Init then serves the page of its rank if the variable C10D_DEBUG_ADDR has an address:
//
//	C10D_DEBUG_ADDR=127.0.0.1:6060 c10d run -n 4 -- ./train     # local rank k: port 6060+k
//	c10d run -debug 127.0.0.1:6060 -n 4 -- ./train              # one page for all ranks
//
// A program can also mount it on its own server. That server then decides who sees it:
//
//	http.Handle("/debug/c10d", debug.New(g.Recorder()))
//
// With ?format=json the page is a Status.
//
// # Who gets in
//
// Serve lets everybody on the host see a page on a loopback address, and refuses other addresses
// without mutual TLS or a token. A request that changes something is a POST with a number from the
// page, so no other site can make a browser send it. A page without protection answers only requests
// for a loopback name. So no other site can read it through a name of its own.
//
// # What it costs
//
// Nothing until somebody asks. Visitors that ask at once share one answer. A page asks the other ranks
// how far they are, at most once a second. It holds no lock of a group while it waits for them, and
// waits a second at most. So a stuck group or a stopped rank does not stop the page.
package debug
