"""Rank 1 has short texts; each rank takes the mean over its own labels. Start it with torchrun --nproc-per-node 2."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WORDS, LENGTH, PADDING = 50, 32, -100


def train() -> None:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Embedding(WORDS, 32), nn.Linear(32, WORDS)))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(1, 25):
        words = torch.randint(WORDS, (4, LENGTH))
        labels = (words + 1) % WORDS
        if dist.get_rank() == 1:
            labels[:, 2:] = PADDING
        loss = nn.functional.cross_entropy(ddp(words).flatten(0, 1), labels.flatten(), ignore_index=PADDING)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 8 == 0 and dist.get_rank() == 0:
            print(f"step {step}  loss {loss:.3f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()
