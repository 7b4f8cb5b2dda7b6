"""Collectives without gradient that took a tensor which needs one: the graph ends there."""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ciuic.doctor.facts_model import CUT_CALL
from ciuic.doctor.probe.part import Call, Part, Step

WITHOUT = ("all_gather", "all_to_all", "gather", "scatter", "all_reduce", "broadcast", "reduce_scatter", "send")
NODES_MAX = 20_000
CALLS_HELD = 16
FRAMES_MAX = 60
TOLD_MAX = 32
ELEMENTS_MIN = 16
"""Smaller ones are metrics."""
ELEMENTWISE = ("AddBackward", "SubBackward", "MulBackward", "IndexAddBackward", "CatBackward")
PRODUCTS = ("MmBackward", "AddmmBackward", "BmmBackward", "LinearBackward")


class _Taken:
    """One tensor that a collective took."""

    def __init__(self, call: Call, tensor: Tensor, made: int, module: str) -> None:
        self.name, self.site, self.ranks = call.name, call.site, call.ranks
        self.node = tensor.grad_fn
        self.shape = tuple(tensor.shape)
        self.module = module
        self.made = made
        """Number of the newest node of the graph at that moment."""


class Cuts(Part):
    """Looks, at the backward passes of sampled steps, whether what was taken still has its way into the loss."""

    def __init__(self, probe: Any) -> None:
        super().__init__(probe)
        self._taken: list[_Taken] = []
        self._told = 0

    def collective_begin(self, call: Call) -> None:
        """Inside an autograd function gradients are off: it takes care of them itself."""
        if len(call.ranks) < 2 or not call.name.startswith(WITHOUT) or not torch.is_grad_enabled():
            return
        if len(self._taken) >= CALLS_HELD or not self.probe.sampler.due(self.probe.step + 1):
            return
        for tensor in call.tensors:
            if (
                tensor.requires_grad
                and tensor.grad_fn is not None
                and tensor.dim() > 1
                and tensor.numel() >= ELEMENTS_MIN
            ):
                self._taken.append(_Taken(call, tensor, torch.autograd._get_sequence_nr(), self._module()))

    def backward_begin(self, roots: tuple[Tensor, ...]) -> None:
        """The graph is complete now."""
        taken, self._taken = self._taken, []
        if not taken or self._told >= TOLD_MAX:
            return
        graph = _Graph(root.grad_fn for root in roots)
        for item in taken:
            how = graph.lost(item)
            if how:
                self._told += 1
                facts = {"call": item.name, "site": item.site[:200], "shape": list(item.shape), "how": how}
                self.probe.note(CUT_CALL, **facts, module=item.module, ranks=len(item.ranks))

    def _module(self) -> str:
        """Path of the innermost module whose method is running; empty when there is none, or it is the whole model."""
        frame: Any = sys._getframe(1)
        for _ in range(FRAMES_MAX):
            frame = frame.f_back if frame is not None else None
            owner = frame.f_locals.get("self") if frame is not None else None
            if isinstance(owner, nn.Module):
                for model in self.probe.models:
                    for name, module in model.module.named_modules():
                        if module is owner:
                            return name
        return ""

    def after_step(self, step: Step) -> None:
        """What was not used until now is not used."""
        self._taken.clear()


class _Graph:
    """All nodes from the roots on."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self.users: dict[Any, list[Any]] = {}
        self.newest = 0
        open_nodes = [root for root in roots if root is not None]
        for root in open_nodes:
            self.newest = max(self.newest, root._sequence_nr())
        seen = set(open_nodes)
        while open_nodes and len(seen) < NODES_MAX:
            node = open_nodes.pop()
            for below, _ in node.next_functions:
                if below is None:
                    continue
                self.users.setdefault(below, []).append(node)
                if below not in seen:
                    seen.add(below)
                    open_nodes.append(below)
        self.is_whole = not open_nodes

    def lost(self, item: _Taken) -> str:
        """`unreachable`: no way into the loss; `one side`: the loss pairs local rows with rows of all ranks that carry
        no gradient; empty: in order, or not known."""
        if self.newest <= item.made or not self.is_whole:
            return ""  # the loss was there before the call: it was for something else
        users = self._near(item.node)
        if not users:
            return "unreachable" if item.node not in self.users and self._uses_constants(item) else ""
        if any(_joins(user, item) for user in users):
            return ""  # its own rows were put back among those of the others
        return "one side" if any(_pairs_with_constant(user, item) for user in users) else ""

    def _uses_constants(self, item: _Taken) -> bool:
        """Whether an operation after the call has a side that needs no gradient and the shape of what the call "
        "returned."""
        rows = {item.shape[0], item.shape[0] * len(item.ranks)}
        for node in {user for users in self.users.values() for user in users}:
            if node._sequence_nr() <= item.made or all(below is not None for below, _ in node.next_functions):
                continue
            if node.name().startswith(PRODUCTS) and rows & set(_sizes(node)):
                return True
            if node.name().startswith(ELEMENTWISE) and _shape(node)[1:] == item.shape[1:] and _shape(node)[0] in rows:
                return True
        return False

    def _near(self, node: Any) -> list[Any]:
        """Users within a few steps."""
        found, level = [], [node]
        for _ in range(4):
            level = [user for each in level for user in self.users.get(each, ())]
            found += level
        return found


def _joins(user: Any, item: _Taken) -> bool:
    name = user.name()
    several = len(user.next_functions) >= len(item.ranks) and name.startswith(("Cat", "Stack"))
    return several or name.startswith(("CopySlices", "IndexPut"))


def _pairs_with_constant(user: Any, item: _Taken) -> bool:
    """A product with a matrix that needs no gradient and has as many rows as all ranks together."""
    if not user.name().startswith(PRODUCTS) or not item.shape:
        return False
    if all(below is not None for below, _ in user.next_functions):
        return False
    return item.shape[0] * len(item.ranks) in _sizes(user)


def _sizes(node: Any) -> list[int]:
    """Of the matrices of a product; without unpacking them."""
    sizes: list[int] = []
    for name in ("_saved_self_sym_sizes", "_saved_mat1_sym_sizes", "_saved_mat2_sym_sizes"):
        sizes += [int(size) for size in getattr(node, name, None) or ()]
    return sizes


def _shape(node: Any) -> tuple[int, ...]:
    """Of its result."""
    found = getattr(node, "_input_metadata", None) or ()
    return tuple(int(size) for size in found[0].shape) if found else (0,)
