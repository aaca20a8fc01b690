// Package c10d is the first page of a module for collective communication in Go: all-reduce and its relatives,
// process groups, and data-parallel training. The ranks are Go processes, or Go and unmodified PyTorch ranks of the
// gloo backend in one job. It is PyTorch's c10d in pure Go. The package has no code: a program imports package pg.
//
//	g, err := pg.Init(ctx, "env://") // rank, size and address from the launcher
//	if err != nil {
//		log.Fatal(err)
//	}
//	defer g.Close()
//	sum := []float32{float32(g.Rank())} // in place: the rank before, the sum of all ranks after
//	if err := pg.Wait(g.AllReduce(ctx, pg.Slice(sum), pg.Sum())); err != nil {
//		log.Fatal(err) // names the operation and the rank at fault
//	}
//
// A launcher starts the program once for each rank: "c10d run" of cmd/c10d, torchrun, Slurm, mpirun or Kubernetes.
//
// # Packages
//
//   - pg: groups and their operations; pg/pgtest runs all ranks inside one test
//   - tensor: arrays over Go slices or device memory
//   - work: the future of an operation, and its errors
//   - ddp: DistributedDataParallel: it averages gradients while the backward pass runs
//   - store: where ranks meet: a TCP server, a file, Redis
//   - trace: what each rank did; trace/debug is a page that shows it
//   - backend: for authors of backends; backend/gloo is for CPU tensors, backend/cuda and backend/nccl for CUDA tensors
//   - cmd/c10d: the launcher, and commands that test, measure and explain a job
//
// README.md has the first steps, and docs/README.md an index.
package c10d
