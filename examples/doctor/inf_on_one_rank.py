"""A corrupt sample on rank 1 makes every step of all ranks be skipped. Start it with torchrun --nproc-per-node 2."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train() -> None:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu")
    torch.manual_seed(1 + dist.get_rank())
    for step in range(1, 25):
        x = torch.randn(32, 16)
        labels = x[:, :4].argmax(1)
        if dist.get_rank() == 1 and step > 4:
            x[0, 3] = float("inf")  # a corrupt file
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(ddp(x).float(), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 8 == 0 and dist.get_rank() == 0:
            print(f"step {step}  loss {loss:.3f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()
