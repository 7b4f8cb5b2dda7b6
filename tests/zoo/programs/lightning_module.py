"""A LightningModule in Lightning's Trainer on two processes that torchrun started."""

import time
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

from zoo.data import Rows
from zoo.world import Zoo

BATCH = 8


class Classifier(lightning.LightningModule):
    """16 features to 4 classes."""

    def __init__(self, zoo: Zoo) -> None:
        super().__init__()
        self.zoo = zoo
        self.backbone = nn.Sequential(nn.Linear(16, 32), nn.ELU(), nn.Linear(32, 24), nn.ELU())
        self.head = nn.Linear(24, 4)
        if zoo.fault == "unfreeze_after_wrap" or zoo.variant == "frozen":
            self.backbone.requires_grad_(False)
        self.automatic_optimization = zoo.variant != "manual"

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))

    def training_step(self, batch: Any, index: int) -> Tensor:
        zoo = self.zoo
        zoo.mishap(self.global_step)
        x, y = batch
        logits = self(x)
        if zoo.fault == "slow_backward" and zoo.rank == 1:
            logits.register_hook(lambda _: time.sleep(0.03))
        loss = cross_entropy(logits, y)
        zoo.log(loss)
        if zoo.fault == "other_metrics" and zoo.rank == 1 and self.global_step == 9:
            return loss
        if zoo.fault == "other_metrics" or zoo.variant == "synced_metrics":
            self.log_dict({"loss": loss, "accuracy": (logits.argmax(1) == y).float().mean()}, sync_dist=True)
        if zoo.variant == "manual":
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        self.log("held_out", cross_entropy(self(x), y), sync_dist=True)

    def on_train_start(self) -> None:
        if self.zoo.fault == "load_on_rank0" and self.zoo.rank == 0:
            nn.init.xavier_uniform_(self.head.weight)

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if self.zoo.fault == "unfreeze_after_wrap" and self.global_step == 4:
            self.backbone.requires_grad_(True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.zoo.fault == "double_reduction":
            for parameter in self.parameters():
                dist.all_reduce(parameter.grad)

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        zoo = self.zoo
        if zoo.fault == "overwritten" and zoo.rank == 1 and self.global_step == 8:
            self.head.bias.data.zero_()
        if zoo.fault == "save_with_barrier" and zoo.rank == 0 and self.global_step == 8:
            self.trainer.save_checkpoint(zoo.folder / "lightning.ckpt")
        if zoo.variant == "saving" and self.global_step == 8:
            self.trainer.save_checkpoint(zoo.folder / "lightning.ckpt")

    def configure_optimizers(self) -> Any:
        lr = 2e-2 if self.zoo.fault == "rate_differs" and self.zoo.rank == 1 else 1e-2
        optimizer = torch.optim.Adam(self.parameters(), lr=lr)
        if self.zoo.variant == "scheduled":
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=self.zoo.steps)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]
        return optimizer


def make_loader(zoo: Zoo) -> DataLoader:
    data = Rows(BATCH * 6 * zoo.world, slow_s=0.004 if zoo.fault == "slow_data" and zoo.rank == 1 else 0.0)
    if zoo.fault == "same_data":
        return DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, zoo.world, 0))
    return DataLoader(data, batch_size=BATCH, shuffle=True)


def main(zoo: Zoo) -> None:
    lightning.seed_everything(8, verbose=False)
    model = Classifier(zoo)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=zoo.world,
        strategy=DDPStrategy(process_group_backend="gloo", timeout=zoo.patience),
        max_steps=zoo.steps,
        max_epochs=-1,
        accumulate_grad_batches=2 if zoo.variant == "accumulation" else 1,
        gradient_clip_val=1.0 if zoo.variant == "clipped" else None,
        use_distributed_sampler=zoo.fault != "same_data",
        num_sanity_val_steps=0,
        check_val_every_n_epoch=2,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        default_root_dir=zoo.folder,
    )
    held_out = DataLoader(Rows(16, seed=1), batch_size=8) if zoo.variant == "evaluating" else None
    trainer.fit(model, make_loader(zoo), held_out)
