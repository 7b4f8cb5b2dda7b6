"""muon_adamw and CombinedOptimizer: who moves what, the same numbers as apart, one optimizer to whoever takes one."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from ciuic.errors import JobFileError, UsageError
from ciuic.job import Job, parse_job
from ciuic.torch import DistributedCosineLR, muon_adamw
from ciuic.train.combined import ALGORITHM, CombinedOptimizer
from ciuic.train.models import build_model
from ciuic.train.muon import StackedMuon, orthogonalise
from ciuic.train.optimizers import build_optimizer, split_by_shape

torch.set_num_threads(1)


class Mixture(nn.Module):
    """Embedding, hidden matrix with bias, router, stacked experts, norm, head."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.hidden, self.norm = nn.Embedding(12, 8), nn.Linear(8, 16), nn.LayerNorm(16)
        self.gate = nn.Linear(16, 4, bias=False)
        self.experts = nn.ParameterDict({"down": torch.randn(4, 16, 8), "up": torch.randn(4, 8, 16)})
        self.head = nn.Linear(16, 12)
        self.to(dtype)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.hidden(self.embed(numbers)))
        weights = self.gate(x).softmax(-1)
        outcome = torch.einsum("bi,eio,eoj,be->bj", x, self.experts["down"], self.experts["up"], weights)
        return self.head(x + outcome)


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> list[float]:
    numbers = torch.arange(12)
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(numbers).float(), (numbers + 1) % 12)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def names_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, set[str]]:
    name = {id(p): n for n, p in model.named_parameters()}
    found: dict[str, set[str]] = {}
    for group in optimizer.param_groups:
        found.setdefault(group[ALGORITHM], set()).update(name[id(p)] for p in group["params"])
    return found


def test_matrices_go_to_muon_stacks_to_stacked_muon_and_the_rest_to_adamw() -> None:
    model = Mixture()
    assert names_of(muon_adamw(model, lr=1e-3), model) == {
        "Muon": {"hidden.weight"},
        "StackedMuon": {"experts.down", "experts.up"},
        "AdamW": {"embed.weight", "hidden.bias", "norm.weight", "norm.bias", "gate.weight", "head.weight", "head.bias"},
    }


def test_deepseek_matrices_and_experts_are_muons_and_its_head_and_routers_are_not(tmp_path: Path) -> None:
    matrices, stacks, rest = ({name for name, _ in part} for part in split_by_shape(build_model(parse_job({}), 256, 0)))
    assert "model.layers.1.self_attn.kv_b_proj.weight" in matrices
    assert "model.layers.1.mlp.shared_experts.gate_proj.weight" in matrices
    assert stacks == {f"model.layers.{n}.mlp.experts.{w}_proj" for n in (1, 2) for w in ("gate_up", "down")}
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.layers.2.mlp.gate.weight", "model.norm.weight"} < rest


def test_tied_head_counts_once_and_frozen_parameters_not_at_all() -> None:
    model = Mixture()
    model.out = nn.Linear(8, 12, bias=False)
    model.out.weight = model.embed.weight
    model.hidden.weight.requires_grad = False
    optimizer = muon_adamw(model, lr=1e-3)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == len({id(p) for p in held}) == len(list(model.parameters())) - 1
    assert "Muon" not in names_of(optimizer, model)


def test_named_parameters_go_to_adamw_and_unknown_names_are_refused() -> None:
    model = Mixture()
    assert "Muon" not in names_of(muon_adamw(model, lr=1e-3, adamw=["hidden.weight"]), model)
    with pytest.raises(UsageError, match=r"no trainable parameter 'hiden\.weight'"):
        muon_adamw(model, lr=1e-3, adamw=["hiden.weight"])
    with pytest.raises(UsageError, match="muon_lr is 0"):
        muon_adamw(model, lr=1e-3, muon_lr=0.0)
    for parameter in model.parameters():
        parameter.requires_grad = False
    with pytest.raises(UsageError, match="at least one parameter"):
        muon_adamw(model, lr=1e-3)


def test_rates_are_separate_and_the_decay_per_step_is_the_same() -> None:
    groups = muon_adamw(Mixture(), lr=1e-3, weight_decay=0.2).param_groups
    by_name = {(group[ALGORITHM], group["params"][0].dim()): group for group in groups}
    assert by_name["Muon", 2]["lr"] == by_name["StackedMuon", 3]["lr"] == 4e-3
    assert by_name["AdamW", 2]["lr"] == by_name["AdamW", 1]["lr"] == 1e-3
    assert {round(g["lr"] * g["weight_decay"], 12) for key, g in by_name.items() if key[1] > 1} == {2e-4}
    assert by_name["AdamW", 1]["weight_decay"] == 0.0


def test_one_optimizer_makes_the_steps_of_its_parts_alone() -> None:
    model, twin = Mixture(), Mixture()
    learn(model, muon_adamw(model, lr=2e-3, muon_lr=5e-3), steps=5)
    matrices, stacks, rest = ([p for _, p in part] for part in split_by_shape(twin))
    decay = 0.1 * 2e-3 / 5e-3
    parts = [
        torch.optim.Muon(matrices, lr=5e-3, momentum=0.9, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        StackedMuon(stacks, lr=5e-3, weight_decay=decay),
        torch.optim.AdamW(
            [{"params": [p for p in rest if p.dim() > 1], "weight_decay": 0.1},
             {"params": [p for p in rest if p.dim() == 1], "weight_decay": 0.0}], lr=2e-3, betas=(0.9, 0.99)
        ),
    ]  # fmt: skip
    for _ in range(5):
        loss = nn.functional.cross_entropy(twin(torch.arange(12)), (torch.arange(12) + 1) % 12)
        twin.zero_grad()
        loss.backward()
        for part in parts:
            part.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("shape", [(4, 16, 8), (3, 8, 24), (2, 5, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stack_of_matrices_moves_as_torchs_muon_moves_each_of_them(shape: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    stack = nn.Parameter(torch.randn(shape).to(dtype))
    apart = [nn.Parameter(matrix.detach().clone()) for matrix in stack]
    ours = StackedMuon([stack], lr=0.02, weight_decay=0.1)
    torchs = torch.optim.Muon(apart, lr=0.02, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        stack.grad = torch.randn(shape).to(dtype)
        for matrix, gradient in zip(apart, stack.grad, strict=True):
            matrix.grad = gradient.clone()
        ours.step()
        torchs.step()
    worst = (stack.detach() - torch.stack(list(apart)).detach()).abs().max()
    assert worst < 0.02 * 0.2 * 4 * (0.1 if dtype == torch.float32 else 1.0)  # of bfloat16 sums in another order


def test_orthogonal_matrices_have_singular_values_near_one_and_untouched_experts_stay_zero() -> None:
    torch.manual_seed(0)
    matrices = torch.randn(3, 12, 20)
    matrices[1] = 0.0
    made = orthogonalise(matrices).float()
    values = torch.linalg.svdvals(made)
    assert made[1].count_nonzero() == 0
    assert float(values[[0, 2]].min()) > 0.4
    assert float(values.max()) < 1.4


def test_expert_without_tokens_is_not_moved_when_nothing_decays() -> None:
    stack = nn.Parameter(torch.ones(2, 4, 4))
    optimizer = StackedMuon([stack], lr=0.1)
    stack.grad = torch.stack([torch.eye(4), torch.zeros(4, 4)])
    optimizer.step()
    assert torch.equal(stack[1], torch.ones(4, 4))
    assert not torch.equal(stack[0], torch.ones(4, 4))


# ---- as one optimizer


def test_hooks_run_once_per_step_and_a_closure_is_called_once() -> None:
    model = Mixture()
    optimizer = muon_adamw(model, lr=1e-3)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    def closure() -> torch.Tensor:
        seen.append("loss")
        loss = model(torch.arange(12)).square().mean()
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) > 0
    assert seen == ["before", "loss", "after"]


def test_thrown_away_moments_are_gone_from_every_part() -> None:
    model = Mixture()
    optimizer = muon_adamw(model, lr=1e-3)
    learn(model, optimizer)
    assert len(optimizer.state) == len(list(model.parameters()))
    optimizer.state.clear()
    learn(model, optimizer)
    steps = {float(state["step"]) for state in optimizer.state.values() if "step" in state}
    assert steps == {1.0}


@pytest.mark.parametrize("way", ["state_dict", "saved", "deepcopy"])
def test_saved_and_loaded_optimizer_goes_on_bit_for_bit(way: str) -> None:
    model = Mixture()
    optimizer = muon_adamw(model, lr=5e-3)
    learn(model, optimizer, steps=3)
    if way == "deepcopy":
        twin, other = copy.deepcopy((model, optimizer))
    else:
        twin = Mixture()
        twin.load_state_dict(model.state_dict())
        other = muon_adamw(twin, lr=1.0)
        state = copy.deepcopy(optimizer.state_dict())
        if way == "saved":
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            state = torch.load(file, weights_only=True)
        other.load_state_dict(state)
    for group in (*optimizer.param_groups, *other.param_groups):
        group["lr"] *= 0.5
    assert learn(twin, other, steps=3) == learn(model, optimizer, steps=3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_state_of_another_optimizer_is_refused() -> None:
    model = Mixture()
    optimizer = muon_adamw(model, lr=1e-3)
    for other in (torch.optim.AdamW(model.parameters()), muon_adamw(model, lr=1e-3, adamw=["hidden.weight"])):
        with pytest.raises(UsageError, match="state is of another optimizer"):
            optimizer.load_state_dict(other.state_dict())


def test_further_parameters_are_refused() -> None:
    with pytest.raises(UsageError, match="takes no further parameters"):
        muon_adamw(Mixture(), lr=1e-3).add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_scheduler_and_scaler_accept_it_and_keep_both_rates_in_ratio() -> None:
    model = Mixture()
    optimizer, scaler = muon_adamw(model, lr=1e-2), GradScaler("cpu", init_scale=4.0)
    DistributedCosineLR(optimizer, 0, 2, steps_per_epoch=5)
    torch.optim.lr_scheduler.LambdaLR(muon_adamw(model, lr=1e-2), lambda epoch: 0.5)
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(torch.arange(12)), torch.arange(12))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    optimizer.step()
    rates = {group[ALGORITHM]: group["lr"] for group in optimizer.param_groups}
    assert rates["AdamW"] == pytest.approx(1e-2 * 0.55)
    assert rates["Muon"] == rates["StackedMuon"] == pytest.approx(4e-2 * 0.55)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_learns_in_single_precision_and_in_bfloat16(dtype: torch.dtype) -> None:
    model = Mixture(dtype)
    losses = learn(model, muon_adamw(model, lr=4e-3, weight_decay=0.0), steps=60)
    assert losses[-1] < 0.5 * losses[0]
    assert all(p.dtype == dtype and p.isfinite().all() for p in model.parameters())


# ---- [optim]


def job(**optim: object) -> Job:
    return parse_job({"optim": optim})


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("adamw", torch.optim.AdamW),
        ("adam", torch.optim.Adam),
        ("sgd", torch.optim.SGD),
        ("muon", CombinedOptimizer),
    ],
)
def test_job_names_the_optimizer(name: str, kind: type) -> None:
    model = Mixture()
    optimizer = build_optimizer(job(optimizer=name, lr=1e-3), model)
    assert type(optimizer) is kind
    learn(model, optimizer)


def test_job_gives_muon_its_numbers() -> None:
    optim = {"optimizer": "muon", "lr": 1e-3, "muon_lr": 9e-3, "momentum": 0.8, "betas": [0.8, 0.9]}
    groups = {g[ALGORITHM]: g for g in build_optimizer(job(**optim, weight_decay=0.3), Mixture()).param_groups}
    assert groups["Muon"]["lr"] == groups["StackedMuon"]["lr"] == 9e-3
    assert groups["Muon"]["momentum"] == groups["StackedMuon"]["momentum"] == 0.8
    assert groups["AdamW"]["betas"] == (0.8, 0.9)


def test_muon_lr_without_muon_is_refused() -> None:
    with pytest.raises(JobFileError) as refused:
        job(muon_lr=1e-2)
    assert refused.value.problems == ('optim.muon_lr needs optim.optimizer = "muon"',)


def test_norms_and_biases_are_not_decayed() -> None:
    model = Mixture()
    decayed, plain = build_optimizer(job(weight_decay=0.3), model).param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert all(parameter.dim() > 1 for parameter in decayed["params"])
    assert all(parameter.dim() == 1 for parameter in plain["params"])
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_frozen_parameters_are_left_out_of_the_optimizer(name: str) -> None:
    model = Mixture()
    model.head.weight.requires_grad = False
    groups = build_optimizer(job(optimizer=name), model).param_groups
    assert all(parameter is not model.head.weight for group in groups for parameter in group["params"])
