// Package membership decides which processes are in the next epoch of a group, through a store
// alone.
//
//	view, err := membership.Decide(ctx, st, membership.Config{Self: 2, Base: view, Suspects: dead})
//
// An *epoch* is a time in which the members of a group stay the same. A *view* says who is in an
// epoch. Every member has an *id* that nobody else ever has: its rank in epoch 0, or the next number
// if it joined later.
//
// # How it works
//
// Keys are under the prefix of a group. E is the next epoch.
//
//  1. A member that wants the next epoch writes vote/E/ID: how many collectives it has completed,
//     and whom it suspects to be gone.
//  2. CompareSet on lead/E elects a leader. All others wait for view/E.
//  3. The leader waits for the votes of the members that nobody suspects, for Config.Patience at
//     most. For suspects it waits for Config.Settle. A suspect that votes in time stays in.
//     Of members that vote and cannot connect with each other it leaves some out.
//  4. The leader asks joiners, which have written join/ID, with call/E. It takes in those that answer in join/ID/E, as far
//     as Config.Max permits. One that does not answer for three quarters of a second has died, or stands still: it gets
//     no place, and applies again when it goes on.
//  5. CompareSet on view/E writes the view. All read it there. A member that it leaves out is
//     evicted.
//
// A leader changes lead/E while it waits. If that key stays the same for too long, another member
// takes it over by CompareSet. Two members may lead for a while. Only the first CompareSet on view/E
// counts, and the other leader gets that view, too.
//
// If fewer than Config.Min members are there, the view says so: it is short. All that have voted
// get a *ShortError. The epoch is used up, nobody is evicted, and the next Decide is about the
// epoch after it.
//
// A member that dies after its vote may be in the view. The others notice when they connect, and
// decide the next epoch.
//
// # What holds, and why
//
//   - An epoch has one view: the store's CompareSet is linearizable, and nothing else writes the
//     key. No majority of the members is needed, because there is one store. Members that
//     do not reach the store decide nothing.
//   - Nobody waits for ever while one live member reaches the store: waits have limits, and a leader
//     that is silent is replaced. The limit doubles with each leader, so that a slow store does not
//     replace leaders for ever.
//   - A view stays in the store, so that a member that comes late finds out that it is evicted.
//   - A process that waits to join looks at the votes of one member after the other, and ends when all have died or left.
//
// model_test.go has a model of the whole: it tries all orders of calls, deaths and timeouts for
// small groups, and random ones for larger groups. leaveout_test.go leaves out one check of the machines after the other:
// a test fails each time.
//
// # Cost
//
// A member calls the store three times. A leader calls it eight times, three times more if a suspect
// does not vote, and with joiners three times more, and once for each of them. One call reads all votes. BenchmarkDecide counts the
// calls.
//
// # Structure
//
// [Member] and [Joiner] are state machines: Next takes the reply of the store and returns the next
// call. They have no clock, goroutine or store. Decide and Join do the calls.
package membership
