"""Balancing the experts of DeepSeek-V3 without an extra loss term.

Source: arXiv 2412.19437, section 2.1.2, and arXiv 2408.15664. Each expert has a bias that is added to its score only
for the choice of experts. After each step the bias of an expert that got fewer tokens than the mean goes up by a fixed
rate, that of one that got more goes down. The biases are buffers and part of the ledger's layout, so nodes agree on
them at each merge.
"""

import logging

import torch
import torch.distributed as dist
from torch import nn

_BIAS = "e_score_correction_bias"
_log = logging.getLogger("ciuic.train")


class ExpertBalancer:
    """Counts the tokens routed to each expert while `model` trains and moves the biases on `step()`.

    Counting happens only inside a forward pass of `model` itself in training mode, so the recomputation of a
    checkpointed layer (which runs inside the backward pass) is not counted a second time.
    """

    def __init__(self, model: nn.Module, rate: float) -> None:
        self._rate = rate
        self._in_forward = False
        self._routers = [m for m in model.modules() if isinstance(getattr(m, _BIAS, None), torch.Tensor)]
        self._counts: dict[nn.Module, torch.Tensor] = {}
        self._handles = [
            model.register_forward_pre_hook(self._enter),
            *(router.register_forward_hook(self._count) for router in self._routers),
            model.register_forward_hook(self._leave, always_call=True),
        ]

    @property
    def routers(self) -> int:
        """How many routers have a correction bias."""
        return len(self._routers)

    def loads(self) -> list[torch.Tensor]:
        """Tokens per expert since the last step, one int64 tensor [experts] per router that ran."""
        return [self._counts[router].clone() for router in self._routers if router in self._counts]

    @torch.no_grad()
    def step(self) -> None:
        """Move each bias by the rate towards equal loads and forget the counts. Call it after `optimizer.step()`.

        Where this process is one rank of a node, the counts of all ranks are added first; all ranks must call it.
        """
        counted = [router for router in self._routers if router in self._counts]
        if counted and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._add_over_ranks(counted)
        for router in counted:
            load = self._counts[router].to(torch.float32)
            bias = getattr(router, _BIAS)
            bias += (self._rate * torch.sign(load.mean() - load)).to(bias.dtype)
        self._counts.clear()

    def close(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def _add_over_ranks(self, routers: list[nn.Module]) -> None:
        flat = torch.cat([self._counts[router] for router in routers])
        dist.all_reduce(flat)
        parts = flat.split([self._counts[router].numel() for router in routers])
        self._counts.update(zip(routers, parts, strict=True))

    def _enter(self, model: nn.Module, args: tuple[object, ...]) -> None:
        self._in_forward = model.training

    def _leave(self, model: nn.Module, args: tuple[object, ...], output: object) -> None:
        self._in_forward = False

    def _count(self, router: nn.Module, args: tuple[object, ...], output: object) -> None:
        if not (self._in_forward and router.training and router in self._routers):
            return
        chosen = output[-1] if isinstance(output, tuple) else output
        if not isinstance(chosen, torch.Tensor) or chosen.is_floating_point():
            _log.warning("experts are not balanced: %s does not return which it chose", type(router).__name__)
            self._routers = [other for other in self._routers if other is not router]
            return
        flat = chosen.detach().reshape(-1)
        counts = self._counts.get(router)
        if counts is None:
            counts = self._counts[router] = torch.zeros(
                getattr(router, _BIAS).numel(), dtype=torch.int64, device=flat.device
            )
        counts.scatter_add_(0, flat, torch.ones_like(flat))
