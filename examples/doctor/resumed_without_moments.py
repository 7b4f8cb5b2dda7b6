"""A run that is started again takes weights and schedule from its checkpoint, and forgets the optimizer.

Start it twice with torchrun --nproc-per-node 2: the first time it writes checkpoint.pt, the second time it resumes.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CHECKPOINT = Path("checkpoint.pt")


def train() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=48)
    first = 1
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT, weights_only=True)
        model.load_state_dict(saved["model"])
        scheduler.load_state_dict(saved["scheduler"])
        first = saved["step"] + 1
    ddp = DistributedDataParallel(model)
    torch.manual_seed(1000 * first + dist.get_rank())
    for step in range(first, first + 24):
        x = torch.randn(32, 16)
        loss = nn.functional.cross_entropy(ddp(x), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % 8 == 0 and dist.get_rank() == 0:
            print(f"step {step}  loss {loss:.3f}")
    if dist.get_rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "scheduler": scheduler.state_dict(), "step": first + 23}, CHECKPOINT)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()
