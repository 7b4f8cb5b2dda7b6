"""Rank 0 loads weights after DDP has made all ranks equal. Start it with torchrun --nproc-per-node 2."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def pretrained() -> dict[str, torch.Tensor]:
    """What torch.load would give."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).state_dict()


def train() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    ddp = DistributedDataParallel(model)
    if dist.get_rank() == 0:  # "loading once is enough"
        model.load_state_dict(pretrained())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(1, 25):
        x = torch.randn(32, 16)
        loss = nn.functional.cross_entropy(ddp(x), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 8 == 0 and dist.get_rank() == 0:
            print(f"step {step}  loss {loss:.3f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()
