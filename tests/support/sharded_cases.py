"""What ranks do together with a model that FSDP2 has spread over them; the same steps with one process to compare."""

import ctypes
import resource
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from ciuic.errors import CiuicError
from ciuic.train.gang import Decision, Gang, Order
from ciuic.train.sharded_state import make_state
from ciuic.train.sharding import check_sharding, is_sharded, reshard, shard_model
from ciuic.train.state import ModelState

WIDTH, WORDS = 16, 37
MMAP_THRESHOLD = -3
"""glibc's M_MMAP_THRESHOLD."""
CPU = torch.device("cpu")


class Block(nn.Module):
    """A layer with an odd width, a one-element parameter, and what training does not change by gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 33), nn.Linear(33, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("bias", torch.zeros(3))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.scale * self.down(nn.functional.gelu(self.up(hidden)))


class Model(nn.Module):
    """A tied embedding, layers, something frozen, a buffer and a counter."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.frozen(self.embed(words))
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


def sharded(model: nn.Module) -> nn.Module:
    """As a program does it itself."""
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def loss_of(model: nn.Module, words: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1).float(), words[:, 1:].flatten())


def make_optimizer(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "muon":
        return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2 and p.requires_grad], lr=1e-2)
    if kind == "adamw":
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return torch.optim.SGD(model.parameters(), lr=0.5)


def batches(count: int) -> Iterator[Tensor]:
    draw = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randint(0, WORDS, (8, 6), generator=draw)


def entries_of(state: ModelState, number: int) -> None:
    """Something arrives for one fragment, as the engine merges it: gather, change theta, scatter."""
    fragment = number % state.layout.fragment_count
    theta = state.gather(fragment)
    theta += np.random.default_rng(number).normal(0, 0.01, len(theta)).astype(np.float32)
    state.scatter(fragment)


def alone(optimizer_kind: str, dtype: torch.dtype, steps: int) -> dict[str, Any]:
    """One process with whole batches: what two ranks with halves must come to."""
    model = Model().to(dtype)
    state = ModelState(model, CPU, 3)
    optimizer = make_optimizer(model, optimizer_kind)
    losses = []
    for number, batch in enumerate(batches(steps)):
        _step(model, optimizer, batch)
        entries_of(state, number)
        losses.append(float(loss_of(model, next(batches(1))).detach()))
    return {
        "theta": state.gather().copy(),
        "losses": losses,
        "layout": state.layout.digest,
        "frozen": state.frozen_digest,
    }


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    loss_of(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def together(
    gang: Gang, optimizer_kind: str, dtype: torch.dtype, steps: int, by_job: bool = False, hybrid: bool = False
) -> dict[str, Any]:
    """The same on ranks: each step with a part of the batch, rank 0 orders, an evaluation after each entry."""
    model = Model(seed=gang.rank).to(dtype)  # rank 0's parameters count
    model.frozen.load_state_dict(Model().to(dtype).frozen.state_dict())
    if by_job:
        optimizer = make_optimizer(model, optimizer_kind)
        shard_model(model, optimizer, "cpu")
        state = make_state(model, CPU, gang, 3)
    else:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("copies", "parts")) if hybrid else None
        for part in (*model.layers, model):
            fully_shard(part, mesh=mesh)
        optimizer = make_optimizer(model, optimizer_kind)
        state = make_state(model, CPU, gang, 3)
    if gang.rank == 0:
        state.gather()[:] = _theta_of_whole(dtype)
        state.scatter()
    losses: list[float] = []

    def follow(order: Order) -> None:
        state.obey(order, evaluate=lambda: losses.append(_evaluate(model)))

    gang.decision(Decision(), follow)
    for number, batch in enumerate(batches(steps)):
        _step(model, optimizer, batch[gang.rank :: gang.size])
        if gang.rank == 0:
            for merge in (False, True):  # what an evaluation leaves whole must not outlive a merge
                if merge:
                    entries_of(state, number)
                gang.order(Order(task="evaluate"))
                losses.append(_evaluate(model))
        gang.decision(Decision(), follow)
    result: dict[str, Any] = {"losses": losses[1::2], "layout": state.layout.digest, "sharded": is_sharded(model)}
    if gang.rank == 0:
        result["theta"], result["frozen"] = state.gather().copy(), state.frozen_digest
    gang.decision(Decision(), follow)
    reshard(model)
    result["tied"] = model.head.weight is model.embed.weight
    result["own"] = sum(p.to_local().numel() for p in model.parameters())
    return result


def _theta_of_whole(dtype: torch.dtype) -> np.ndarray:
    return ModelState(Model().to(dtype), CPU, 3).gather()


@torch.no_grad()
def _evaluate(model: nn.Module) -> float:
    """Leaves the root's own parameters whole on this rank, as FSDP2 does."""
    return float(loss_of(model, next(batches(1))))


def rank_0_evaluates_alone(gang: Gang) -> str:
    """What a rank says that is to evaluate and has nothing for it."""
    state = make_state(sharded(Model()), CPU, gang)
    try:
        led(gang, state, lambda: gang.order(Order(task="evaluate")))
    except CiuicError as error:
        gang.decision(Decision())
        return f"{error.message} {error.next}"
    return ""


def orders(gang: Gang) -> list[Any]:
    """What comes to the other ranks, in order, then rank 0's decision; and an order that nobody expects."""
    seen: list[Any] = []
    sent = [Order(task="gather", fragment=3), Order(task="scatter"), Order(task="hold"), Order(task="restore")]
    for order in sent:
        gang.order(order)
    mine = Decision(status="work", changed=True, void_moments=True, progress=0.75) if gang.rank == 0 else Decision()
    seen.append(gang.decision(mine, seen.append))
    gang.order(Order(task="evaluate"))
    try:
        seen.append(gang.decision(Decision()).status)
    except CiuicError as error:
        seen.append(error.message)
        gang.decision(Decision())
    return seen


def led(gang: Gang, state: ModelState, lead: Callable[[], Any], obey: Callable[[Order], None] | None = None) -> Any:
    """Rank 0 does something with the state; the others take part in it."""
    result = lead() if gang.rank == 0 else None
    gang.decision(Decision(), obey or state.obey)
    return result


def hold_and_fail(gang: Gang) -> dict[str, Any]:
    """Values that the model holds for a while, and the same when the evaluation fails on every rank."""
    model = sharded(Model())
    state = make_state(model, CPU, gang, 2)
    own = [p.to_local().clone() for p in model.parameters()]
    seen: list[float] = []

    def evaluate() -> None:
        seen.append(_evaluate(model))

    def hold() -> None:
        theta = state.gather().copy()
        with state.holding(np.zeros_like(theta)):
            gang.order(Order(task="evaluate"))
            evaluate()
        seen.append(float(np.array_equal(theta, state.theta)))

    led(gang, state, hold, lambda order: state.obey(order, evaluate=evaluate))
    equal = [torch.equal(p.to_local(), before) for p, before in zip(model.parameters(), own, strict=True)]
    after = _evaluate(model)

    def fail() -> None:
        try:
            with state.holding(np.zeros(state.theta.shape, np.float32)):
                raise KeyError
        except KeyError:
            pass

    led(gang, state, fail)
    back = [torch.equal(p.to_local(), before) for p, before in zip(model.parameters(), own, strict=True)]
    return {"seen": seen, "equal": equal, "after": after, "back": back if gang.rank == 0 else None}


def buffers_and_counters(gang: Gang) -> dict[str, Any]:
    """Rank 0's buffers become the node's with a scatter."""
    model = sharded(Model())
    state = make_state(model, CPU, gang)
    model.layers[0].bias.fill_(gang.rank + 1)
    model.steps.fill_(gang.rank)

    def lead() -> None:
        state.gather()
        state.scatter()

    led(gang, state, lead)
    state.raise_counters((5, 0))
    return {"bias": model.layers[0].bias.tolist(), "counters": state.counters()}


def memory(gang: Gang, megabytes: int, count: int) -> dict[str, float]:
    """MB by which the peak of a process grows with two gathers and two scatters of `count` parameters."""
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 16)  # freed memory goes back at once: the peak is what is in use
    rows = megabytes * (1 << 20) // 4 // 1024
    model = nn.Module()
    with torch.device("meta"):  # so that no rank ever has the whole model
        model.layers = nn.ModuleList(nn.Linear(1024, rows, bias=False) for _ in range(count))
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.to_local().detach().normal_()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    state = make_state(model, CPU, gang)

    def lead() -> None:
        for _ in range(2):
            state.gather()
            state.scatter()

    led(gang, state, lead)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {"grown_mb": grown, "theta_mb": 0.0 if state.flat.is_meta else state.flat.numel() * 4 / (1 << 20)}


def refusals(gang: Gang) -> dict[str, str]:
    """What each model that cannot be synchronised is told."""

    def told(model: nn.Module, ranks: int = gang.size) -> str:
        try:
            check_sharding(model, ranks)
        except CiuicError as error:
            return f"{error.message} | {error.cause} | {error.next}"
        return "accepted"

    half = Model()
    fully_shard(half.layers[0])
    ignoring = Model()
    fully_shard(ignoring, ignored_params={ignoring.norm.weight})
    frozen_ignored = Model()
    fully_shard(frozen_ignored, ignored_params={frozen_ignored.frozen.weight})
    columns = nn.Linear(8, 8)
    mesh = init_device_mesh("cpu", (gang.size,))
    columns.weight = nn.Parameter(distribute_tensor(columns.weight.detach(), mesh, [Shard(1)]))
    flat = FullyShardedDataParallel(nn.Linear(8, 8), device_id=CPU)
    grid = init_device_mesh("cpu", (1, gang.size), mesh_dim_names=("dp", "tp"))
    both = nn.Linear(8, 8, bias=False)
    both.weight = nn.Parameter(distribute_tensor(both.weight.detach(), grid["tp"], [Shard(0)]))
    fully_shard(both, mesh=grid["dp"])
    return {
        "plain": told(Model()),
        "good": told(sharded(Model())),
        "one rank": told(sharded(Model()), 1),
        "more ranks": told(sharded(Model()), gang.size + 1),
        "half": told(half),
        "ignoring": told(ignoring),
        "frozen ignored": told(frozen_ignored),
        "tensor parallel": told(columns),
        "both": told(both),
        "fsdp1": told(nn.Sequential(flat)),
    }


def job_shards(gang: Gang) -> dict[str, Any]:
    """`shard_model` with parameters of two types, an optimizer with groups, and one that has made a step."""
    model = Model().bfloat16()
    model.layers[1].up.float()
    held = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([{"params": held[:2]}, {"params": held[2:]}], lr=1e-3)
    groups = [group["params"] for group in optimizer.param_groups]
    shard_model(model, optimizer, "cpu")
    known = {id(p) for p in model.parameters()}
    kinds = {type(module).__name__ for module in model.modules() if isinstance(module, Block)}
    stepped = nn.Linear(4, 4)
    used = torch.optim.AdamW(stepped.parameters())
    stepped(torch.ones(1, 4)).sum().backward()
    used.step()
    try:
        shard_model(stepped, used, "cpu")
        refused = ""
    except CiuicError as error:
        refused = error.message
    return {
        "all known": all(id(p) in known for group in groups for p in group),
        "same lists": [a is b["params"] for a, b in zip(groups, optimizer.param_groups, strict=True)],
        "sizes": [len(group) for group in groups],
        "blocks": kinds,
        "refused": refused,
    }
