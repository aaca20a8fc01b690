// Package blame finds out why an operation runs out of time: which rank or which link is to blame.
//
// A rank whose operation is about to run out of time asks all others how far they are and for whom they wait. It asks
// again and again, and an [Inquiry] says when, about whom, and what the answers show:
//
//	q := blame.New(self, hosts, checks, time.Now())
//	for {
//		limit, about := q.Ask(time.Now(), call)
//		health := mesh.Diagnose(limit, about...)
//		q.Hear(time.Now(), health, 0)
//		if v, ok := q.Judge(time.Now(), call); ok {
//			return v
//		}
//		time.Sleep(time.Until(q.Next(time.Now(), call)))
//	}
//
// A [Verdict] blames a rank that is dead, has stopped, has left or has not called the operation, or a broken link. It
// blames nobody if ranks wait for each other in a circle, or if anything may only be slow. It then shows what the
// answers say.
//
// The package is pure: it has no mesh, no clock and no goroutine.
package blame
