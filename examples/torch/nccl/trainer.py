"""A rank of PyTorch that trains a line with others, and has the last rank, which is a Go program, evaluate it."""
import os, torch, torch.distributed as dist

rank, size, local = (int(os.environ[k]) for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
torch.cuda.set_device(local)
dist.init_process_group("nccl")
trainers = dist.new_group(list(range(size - 1)))  # the Go rank calls it too, without being a member
params = torch.zeros(2, device="cuda")
torch.manual_seed(rank)
for epoch in range(5):
    for step in range(100):
        x = torch.rand(64, device="cuda")
        error = params[0] * x + params[1] - (3 * x + 1)
        grad = torch.stack([(error * x).mean(), error.mean()])
        dist.all_reduce(grad, op=dist.ReduceOp.AVG, group=trainers)
        params -= 0.5 * grad
    dist.broadcast(params, 0)
    loss = torch.zeros(1, device="cuda")
    dist.broadcast(loss, size - 1)
    if rank == 0:
        print(f"epoch {epoch}: the Go rank says {loss.item():.5f}", flush=True)
dist.destroy_process_group()
