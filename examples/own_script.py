"""Your own PyTorch loop on many machines: `join`, `prepare`, and the loop as it always was (see own_script.toml)."""

import logging
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ciuic

logging.basicConfig(level=logging.INFO, format="%(message)s")


class NextByte(nn.Module):
    """Predicts byte t + 1 from the bytes up to t: [batch, seq] -> [batch, seq, 256]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru, self.head = nn.Embedding(256, 64), nn.GRU(64, 128, batch_first=True), nn.Linear(128, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(self.embed(text))[0])


def loss_of(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


run = ciuic.join()  # which run, which node, which device: ciuic knows
torch.manual_seed(run.job.train.seed)
files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
windows = text[: len(text) // 65 * 65].view(-1, 65)
training, held_out = windows[:-64], windows[-64:].long().to(run.device)

model = NextByte().to(run.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=run.job.optim.lr)
loader = DataLoader(TensorDataset(training), batch_size=run.job.optim.batch_size)


@torch.no_grad()
def evaluate() -> tuple[float, int]:
    return float(loss_of(model, held_out)), len(held_out)


model, optimizer, loader = run.prepare(model, optimizer, loader)  # from here on ciuic leases samples and synchronises
run.on_evaluate(evaluate)
for step, (batch,) in enumerate(loader):
    loss = loss_of(model, batch.long().to(run.device))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    run.record(loss)  # for `ciuic status` and the live page
    if step % 50 == 0:
        logging.info("step %d  loss %.3f  %.0f%% of the run", step, loss.item(), 100 * run.progress)
