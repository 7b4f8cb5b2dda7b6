"""Tokens that reach experts, counted where the experts are called."""

import logging

import pytest
import torch
from torch import Tensor, nn
from transformers.models.deepseek_v3 import DeepseekV3ForCausalLM

from ciuic.train.deepseek import preset_config
from ciuic.train.routed import RoutedTokens
from ciuic.train.state import ModelState

torch.set_num_threads(1)
LAYERS = ("model.layers.1.mlp", "model.layers.2.mlp")
SMALL = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16}


def all_of(layers: tuple[str, ...], experts: range) -> frozenset[tuple[str, int]]:
    return frozenset((layer, expert) for layer in layers for expert in experts)


@pytest.fixture
def model() -> DeepseekV3ForCausalLM:
    torch.manual_seed(0)
    return DeepseekV3ForCausalLM(preset_config("deepseek-v3-tiny", 64, SMALL)).train()


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))


def starve(model: nn.Module, first: int) -> None:
    """No token is routed to experts from `first` on."""
    for module in model.modules():
        bias = getattr(module, "e_score_correction_bias", None)
        if isinstance(bias, Tensor):
            bias[first:] = -10.0


def test_each_token_counts_once_for_each_expert_that_it_reaches(model: nn.Module, tokens: Tensor) -> None:
    starve(model, 4)
    routed = RoutedTokens(model, all_of(LAYERS, range(8)))
    hot, cold = all_of(LAYERS, range(4)), all_of(LAYERS, range(4, 8))
    assert routed.take(hot) == -1  # nothing ran yet
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert routed.take(hot) == 2 * 32 * 2  # layers x tokens x experts per token
    assert routed.take(cold) == 0
    assert routed.take(hot) == -1
    model(input_ids=tokens)
    model(input_ids=tokens)
    assert routed.take(hot) == 2 * 2 * 32 * 2
    model.eval()(input_ids=tokens)
    assert routed.take(hot) == -1


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_a_checkpoint_computes_again_is_not_counted_again(
    model: DeepseekV3ForCausalLM, tokens: Tensor, use_reentrant: bool
) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    everything = all_of(LAYERS, range(8))
    routed = RoutedTokens(model, everything)
    embedded = model.get_input_embeddings()(tokens)
    model(inputs_embeds=embedded, labels=tokens, use_cache=False).loss.backward()
    assert routed.take(everything) == 2 * 32 * 2


class Block(nn.Module):
    """Experts as modules of their own, each called with its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            out[rows] = expert(x[rows])
        return out


def test_experts_that_are_modules_count_the_tokens_they_get() -> None:
    model = Block()
    routed = RoutedTokens(model, all_of(("",), range(3)))
    model(torch.zeros(6, 4), torch.tensor([0, 0, 2, 0, 2, 2]))
    assert [routed.take(frozenset({("", n)})) for n in range(3)] == [3, 0, 3]


class Hidden(nn.Module):
    """Stacked experts that choose for themselves."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.zeros(3, 4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.up[0]

    def __init__(self) -> None:
        super().__init__()
        self.experts = self.Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x)


def test_experts_that_do_not_say_which_they_are_make_the_count_unknown(caplog: pytest.LogCaptureFixture) -> None:
    model = Hidden()
    everything = all_of(("",), range(3))
    routed = RoutedTokens(model, everything)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            model(torch.zeros(2, 4))
    assert routed.take(everything) == -1
    assert len(caplog.records) == 1


def test_a_closed_counter_counts_nothing(model: nn.Module, tokens: Tensor) -> None:
    everything = all_of(LAYERS, range(8))
    routed = RoutedTokens(model, everything)
    routed.close()
    model(input_ids=tokens)
    assert routed.take(everything) == -1


def test_a_state_tells_the_accesses_of_each_fragment(model: nn.Module, tokens: Tensor) -> None:
    starve(model, 4)
    state = ModelState(model, torch.device("cpu"), 6, "expert")
    model(input_ids=tokens)
    found = [state.accesses(f) for f in range(6)]
    assert sum(count for count in found if count > 0) == 2 * 32 * 2
    assert found[0] == -1  # no experts there
    assert found[-1] == 0
    assert ModelState(model, torch.device("cpu"), 6).accesses(1) == -1
