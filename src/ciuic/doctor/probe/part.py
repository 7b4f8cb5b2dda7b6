"""What a part of the probe sees. A part looks at one class of faults, on its own rank."""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ciuic.doctor.record import Facts, Question

if TYPE_CHECKING:
    from ciuic.doctor.probe.probe import Probe


_GONE = nn.Module()
"""In the place of a module that the program has let go: it has nothing to look at."""


class Model:
    """A module that an optimizer trains, or that was wrapped. It is the program's: this keeps nothing alive."""

    def __init__(
        self,
        *,
        index: int,
        module: nn.Module,
        wrapper: nn.Module | None = None,
        kind: str = "plain",
        ranks: tuple[int, ...] = (),
    ) -> None:
        self.index = index
        self.kind = kind
        """plain, ddp, sharded (FSDP2: parameters are DTensors) or ledger (synchronised by Ciuic between nodes)."""
        self.ranks = ranks
        """That must hold the same parameters, when something says so (a DDP's group, a replicate mesh)."""
        self.wrapper_forwards = 0
        """Training forward passes through the wrapper since the last optimizer step."""
        self.forwards = 0
        """Training forward passes of the module itself since the last optimizer step."""
        self.synced_forwards = 0
        """Of those through the wrapper, the ones after which DDP reduces (not under no_sync)."""
        self.passes = [0, 0, 0, 0]
        """Training forward passes since the start: of the module, through the wrapper, of those with a reduction after
        them, and whether the last one through the wrapper was such a one."""
        self._module = weakref.ref(module)
        self._wrapper = None if wrapper is None else weakref.ref(wrapper)

    @property
    def module(self) -> nn.Module:
        """Without wrappers: names are those of its own parameters. Empty when the program has let it go."""
        module = self._module()
        return _GONE if module is None else module

    @property
    def wrapper(self) -> nn.Module | None:
        """DistributedDataParallel, while there is one."""
        return None if self._wrapper is None else self._wrapper()

    @property
    def is_there(self) -> bool:
        """Whether the program still has it."""
        return self._module() is not None

    @property
    def name(self) -> str:
        """Its class."""
        return type(self.module).__name__

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Name and parameter, each parameter once (a tied one under its first name)."""
        return self.module.named_parameters()

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Name and buffer."""
        return self.module.named_buffers()


@dataclass(eq=False, kw_only=True)
class Step:
    """One attempt of an optimizer to step."""

    optimizer: Optimizer
    index: int
    """Of the optimizer, in the order of first steps."""
    number: int
    """Attempts so far, from 1."""
    due: bool
    """Whether it is sampled: parts look closely at these only, and put what they find into `facts`."""
    closure: bool
    """The optimizer was given a closure: gradients belong to this step only after it."""
    scaler: Any = None
    """The GradScaler that asked for it."""
    taken: bool = False
    """The optimizer has really stepped."""
    facts: Facts = field(default_factory=dict)


@dataclass(eq=False, kw_only=True)
class Call:
    """One collective or point-to-point call of the program (DDP's own reductions are not seen here)."""

    name: str
    """As torch.distributed names it: all_reduce, broadcast, barrier ..."""
    number: int
    """Calls of this group so far, from 1."""
    ranks: tuple[int, ...]
    """Of the group."""
    site: str
    """File, line and function of the program that called."""
    tensors: tuple[Tensor, ...] = ()
    """Given to it (inputs and outputs as torch passes them)."""
    operation: str = ""
    """SUM, AVG ... where there is one."""
    group: str = ""
    """The group's name, the same on all of its ranks."""
    backend: str = ""
    """gloo, nccl ..."""


class Part:
    """Override what you need; what is not overridden costs nothing. An event that raises is switched off."""

    def __init__(self, probe: "Probe") -> None:
        self.probe = probe

    def model_found(self, model: Model) -> None:
        """Wrapped, given to `watch`, or found at an optimizer's first step."""

    def wrapping(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """DistributedDataParallel(*arguments, **keywords) is about to be built around a module."""

    def optimizer_found(self, optimizer: Optimizer, index: int) -> None:
        """Before its first step; its models are known."""

    def optimizer_replaced(self, index: int, heir: int) -> None:
        """The optimizer that was known as `heir` has this index from now on: it has the parameters of the one that had
        it, which steps no more. It is about to step. They are the same where one got the index of another that is no
        more."""

    def forward_begin(self, model: Model, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """The module itself is called; a DDP has broadcast its buffers."""

    def forward_end(self, model: Model, output: Any) -> None:
        """The module itself has returned."""

    def backward_begin(self, roots: tuple[Tensor, ...]) -> None:
        """torch.autograd.backward is called."""

    def bucket(self, bucket: Any) -> None:
        """DDP gives a bucket of this rank's own gradients to a communication hook; in a thread of autograd."""

    def backward_end(self, roots: tuple[Tensor, ...]) -> None:
        """It has returned: gradients are there, reduced where DDP reduces."""

    def before_step(self, step: Step) -> None:
        """Of every step; look closely only when it is due."""

    def after_step(self, step: Step) -> None:
        """The optimizer has stepped (step.taken), or a scaler has skipped it."""

    def scheduler_step(self, scheduler: Any) -> None:
        """A learning-rate scheduler has stepped (not the step in its constructor)."""

    def scheduler_made(self, scheduler: Any) -> None:
        """A learning-rate scheduler was built, not by another one's constructor."""

    def zero_grad(self, owner: Any) -> None:
        """An optimizer or module is about to clear gradients."""

    def scaled(self, scaler: Any, loss: Any) -> None:
        """GradScaler.scale was called."""

    def unscaled(self, scaler: Any, optimizer: Optimizer) -> None:
        """GradScaler.unscale_ has returned (also when step calls it)."""

    def scale_updated(self, scaler: Any, before: float) -> None:
        """GradScaler.update has returned; `before` was the scale."""

    def clipped(self, parameters: list[Tensor], limit: float, norm: Any) -> None:
        """Gradients were clipped to a norm; `norm` is what torch returned (before clipping)."""

    def loading(self, target: Any, state: Any) -> None:
        """load_state_dict is about to begin."""

    def loaded(self, target: Any, state: Any, result: Any) -> None:
        """load_state_dict of a module, optimizer, scheduler or scaler has returned."""

    def saved(self, what: Any, wall_s: float) -> None:
        """torch.save has returned."""

    def saved_to(self, what: Any, where: Any) -> None:
        """torch.save has returned; `where` is the path or file it was given."""

    def read(self, where: Any, what: Any) -> None:
        """torch.load has returned; `where` is the path or file it was given."""

    def read_into(self, where: Any, state: Any) -> None:
        """torch.distributed.checkpoint has filled a state that the program gave it."""

    def batch(self, loader: Any, batch: Any, wait_s: float) -> None:
        """A DataLoader gave a batch; the loop waited for it so long."""

    def loader_begins(self, loader: Any) -> None:
        """iter(DataLoader)."""

    def loader_ends(self, loader: Any, batches: int) -> None:
        """StopIteration."""

    def epoch_set(self, sampler: Any, epoch: int) -> None:
        """DistributedSampler.set_epoch."""

    def collective_begin(self, call: Call) -> None:
        """The program calls a collective."""

    def wrapper_begin(self, model: Model) -> None:
        """A DDP is called: next it broadcasts its buffers, then it calls the module."""

    def collective_wait(self, call: Call | None) -> None:
        """The program waits for a collective that it called before; None: an unknown one."""

    def collective_end(self, call: Call) -> None:
        """The call has returned (the data may still be on its way when it is asynchronous)."""

    def tick(self) -> Facts:
        """From the probe's own thread, once for each beat: facts for it. Touch no tensor."""
        return {}

    def answer(self, question: Question) -> Facts | None:
        """From the probe's own thread: None: not this part's."""
        return None

    def ends(self) -> Facts:
        """The program ends: facts for the last message."""
        return {}
