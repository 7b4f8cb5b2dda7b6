"""The Trainer of Hugging Face with a tiny GPT-2."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from zoo.data import VOCABULARY, Windows, as_features
from zoo.world import Zoo

BATCH = 4


class Features(Dataset):
    """The windows as dictionaries; some labels may be ignored."""

    def __init__(self, zoo: Zoo, count: int) -> None:
        self.zoo = zoo
        self.windows = Windows(count, slow_s=0.008 if zoo.fault == "slow_data" and zoo.rank == 1 else 0.0)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        features = as_features(self.windows[index])
        if self.zoo.fault == "token_imbalance":
            features["labels"][(3 if self.zoo.rank == 1 else 16) :] = -100
        return features


class FeatureStream(IterableDataset):
    """The same without a length; the Trainer shares it out."""

    def __init__(self, zoo: Zoo, count: int) -> None:
        self.features = Features(zoo, count)

    def __iter__(self) -> Any:
        return (self.features[index] for index in range(len(self.features)))


class Watching(TrainerCallback):
    """Records losses, and does what users' callbacks do."""

    def __init__(self, zoo: Zoo) -> None:
        self.zoo = zoo

    def on_step_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self.zoo.mishap(state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        if self.zoo.fault == "double_reduction":
            for parameter in parts["model"].parameters():
                dist.all_reduce(parameter.grad)

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        zoo = self.zoo
        if zoo.fault == "overwritten" and zoo.rank == 1 and state.global_step == 7:
            parts["model"].transformer.ln_f.weight.data.mul_(1.01)
        if zoo.fault == "local_decision" and zoo.rank == 1 and state.global_step == 9:
            control.should_training_stop = True
        if zoo.variant == "stop_early" and state.global_step == zoo.steps * 3 // 4:
            control.should_training_stop = True


class OwnTrainer(Trainer):
    """With the loss as users override it."""

    zoo: Zoo

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        if self.zoo.fault == "module_forward":
            model = self.accelerator.unwrap_model(model)
        if self.zoo.fault == "slow_forward" and self.zoo.rank == 1:
            time.sleep(0.03)
        loss = super().compute_loss(model, inputs, *args, **options)
        self.zoo.log(loss[0] if isinstance(loss, tuple) else loss)
        return loss

    def get_train_dataloader(self) -> Any:
        if self.zoo.fault != "same_data":
            return super().get_train_dataloader()
        random = torch.Generator().manual_seed(0)
        return torch.utils.data.DataLoader(
            self.train_dataset, batch_size=BATCH, shuffle=True, generator=random, collate_fn=self.data_collator
        )


def arguments(zoo: Zoo) -> TrainingArguments:
    options: dict[str, Any] = {}
    if zoo.variant == "accumulation":
        options["gradient_accumulation_steps"] = 2
    if zoo.variant == "checkpointing":
        options["gradient_checkpointing"] = True
    if zoo.variant in ("saving", "evaluating"):
        options |= {"save_strategy": "steps", "save_steps": 8}
    if zoo.variant == "evaluating":
        options |= {"eval_strategy": "steps", "eval_steps": 8}
    if zoo.variant == "bf16":
        options["bf16"] = True
    rate = 4e-3 if zoo.fault == "rate_differs" and zoo.rank == 1 else 2e-3
    options = {"save_strategy": "no"} | options
    return TrainingArguments(
        output_dir=str(zoo.folder / "output"),
        max_steps=zoo.steps,
        per_device_train_batch_size=BATCH,
        learning_rate=rate,
        lr_scheduler_type="constant" if zoo.variant == "constant" else "cosine",
        warmup_steps=3,
        label_smoothing_factor=0.1 if zoo.variant == "smoothing" else 0.0,
        average_tokens_across_devices=zoo.fault != "token_imbalance",
        logging_steps=5,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_num_workers=0,
        seed=3,
        **options,
    )


def main(zoo: Zoo) -> None:
    dist.init_process_group("gloo", timeout=zoo.patience)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    optimizers: tuple[Any, Any] = (None, None)
    if zoo.fault == "stale_optimizer":
        optimizers = (torch.optim.AdamW(GPT2LMHeadModel(config).parameters(), lr=2e-3), None)
    if zoo.variant == "frozen_embedding":
        model.transformer.wpe.requires_grad_(False)
    OwnTrainer.zoo = zoo
    kind = FeatureStream if zoo.variant == "stream" else Features
    trainer = OwnTrainer(
        model=model,
        args=arguments(zoo),
        train_dataset=kind(zoo, BATCH * 6 * zoo.world if zoo.variant != "stream" else 4000),
        eval_dataset=Features(zoo, 16),
        callbacks=[Watching(zoo)],
        optimizers=optimizers,
    )
    trainer.train()
