"""A prepared scheduler makes one step per process. Start it with torchrun --nproc-per-node 2."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 24


def main() -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    x = torch.randn(STEPS * 32 * accelerator.num_processes, 16)
    loader = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)  # as long as the run
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for step, (batch, labels) in enumerate(loader, start=1):
        loss = nn.functional.cross_entropy(model(batch), labels)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        if step % 8 == 0:
            accelerator.print(f"step {step}  loss {loss:.3f}  rate {scheduler.get_last_lr()[0]:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
