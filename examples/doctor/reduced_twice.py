"""DDP has averaged the gradients, and an older loop sums them again. Start it with torchrun --nproc-per-node 2."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train() -> None:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(1, 25):
        x = torch.randn(32, 16)
        loss = nn.functional.cross_entropy(ddp(x), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        for parameter in ddp.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        if step % 8 == 0 and dist.get_rank() == 0:
            print(f"step {step}  loss {loss:.3f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()
