"""Fragments by expert: each expert whole in one fragment, nothing lost between model, slices and theta."""

import copy
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.models.deepseek_v3 import DeepseekV3ForCausalLM

from ciuic.errors import ModelError
from ciuic.ledger.experts import Expert, describe_experts, experts_by_fragment
from ciuic.ledger.layout import Layout, Slice, Tensor, layout_from_dict, make_layout
from ciuic.train.deepseek import preset_config
from ciuic.train.experts import runs
from ciuic.train.state import ModelState
from ciuic.train.tensors import assign_experts, model_layout

torch.set_num_threads(1)
CPU = torch.device("cpu")
SMALL = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16}


def deepseek(seed: int = 0, **overrides: Any) -> nn.Module:
    torch.manual_seed(seed)
    return DeepseekV3ForCausalLM(preset_config("deepseek-v3-tiny", 64, SMALL | overrides))


class Modules(nn.Module):
    """A mixture whose experts are modules of their own, with layers of different size."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.layers = nn.ModuleList()
        for width in (8, 24):
            layer = nn.Module()
            layer.router = nn.Linear(8, 6)
            layer.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8)) for _ in range(6))
            self.layers.append(layer)


def sizes(layout: Layout) -> list[int]:
    return [layout.fragment_shape(f).element_count for f in range(layout.fragment_count)]


def fragments_of(layout: Layout) -> dict[Expert, set[int]]:
    """Where each expert is."""
    found: dict[Expert, set[int]] = defaultdict(set)
    for fragment, experts in enumerate(experts_by_fragment(layout)):
        for expert in experts:
            found[expert].add(fragment)
    return found


def test_a_fragment_has_the_same_experts_of_every_layer_and_the_rest_comes_first() -> None:
    layout, _ = model_layout(deepseek(), 6, "expert")
    named = [describe_experts(experts) for experts in experts_by_fragment(layout)]
    rest = named.count("")
    assert named[:rest] == [""] * rest
    assert rest >= 1
    assert named[rest:] == {4: ["experts 0-1", "experts 2-3", "experts 4-5", "experts 6-7"]}.get(6 - rest, named[rest:])
    assert all(t.fragment < rest for t in layout.tensors if "experts." not in t.name.replace("shared_experts", ""))
    part = next(t for t in layout.tensors if t.fragment == rest)
    assert isinstance(part.part, Slice)
    assert part.row_aligned
    assert layout_from_dict(__import__("msgspec").to_builtins(layout)) == layout


@pytest.mark.parametrize("make", [deepseek, Modules])
@pytest.mark.parametrize("fragments", [2, 3, 5, 9, 13])
def test_every_expert_is_whole_in_one_fragment_and_every_element_is_there_once(make: Any, fragments: int) -> None:
    model = make()
    layout, _ = model_layout(model, fragments, "expert")
    places = fragments_of(layout)
    assert len(places) == (16 if make is deepseek else 12)
    assert all(len(found) == 1 for found in places.values())
    floats = [t for t in model.state_dict().values() if t.is_floating_point()]
    assert sum(sizes(layout)) == sum(t.numel() for t in floats)
    units = [_elements(layout, expert) for expert in places]
    mine = [size for size, experts in zip(sizes(layout), experts_by_fragment(layout), strict=True) if experts]
    assert max(mine) <= sum(mine) / len(mine) + max(units)


def _elements(layout: Layout, expert: Expert) -> int:
    layer, index = expert
    found = 0
    for t in layout.tensors:
        if isinstance(t.part, Slice) and t.source.startswith(f"{layer}.experts."):
            found += t.element_count // t.shape[0] if t.part.start <= index < t.part.stop else 0
        elif t.name.startswith(f"{layer}.experts.{index}."):
            found += t.element_count
    return found


@given(
    layers=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 5), st.booleans()), min_size=1, max_size=4),
    rest=st.lists(st.integers(1, 200), min_size=1, max_size=6),
    fragments=st.integers(2, 20),
)
def test_any_mixture_is_cut_into_whole_experts(
    layers: list[tuple[int, int, bool]], rest: list[int], fragments: int
) -> None:
    specs = [Tensor(name=f"norm.{n}", shape=(size,), dtype="float32", section="small") for n, size in enumerate(rest)]
    for number, (experts, width, is_stacked) in enumerate(layers):
        name = f"layers.{number}.mlp.experts"
        shapes = {"up": (width, 3), "down": (3, width), "bias": (width,)}
        for part, shape in shapes.items():
            found = {f"{name}.{part}": (experts, *shape)} if is_stacked else {}
            found = found or {f"{name}.{n}.{part}.weight": shape for n in range(experts)}
            specs += [Tensor(name=n, shape=x, dtype="float32", section="small") for n, x in found.items()]
    total = sum(experts for experts, _, _ in layers)
    if not 2 <= fragments <= total + len(rest):
        with pytest.raises(ModelError, match="by expert"):
            assign_experts(specs, fragments)
        return
    layout = make_layout(assign_experts(specs, fragments), fragments)
    assert sum(sizes(layout)) == sum(spec.element_count for spec in specs)
    places = fragments_of(layout)
    assert len(places) == total
    assert all(len(found) == 1 for found in places.values())
    assert not any("norm" in t.name for t in layout.tensors if t.fragment in set().union(*places.values()))


@given(given_sizes=st.lists(st.integers(1, 100), min_size=1, max_size=40), count=st.integers(1, 40))
def test_runs_are_in_order_none_empty_and_near_their_share(given_sizes: list[int], count: int) -> None:
    count = min(count, len(given_sizes))
    groups = runs(given_sizes, count)
    assert groups == sorted(groups)
    assert set(groups) == set(range(count))
    totals = [sum(x for x, g in zip(given_sizes, groups, strict=True) if g == n) for n in range(count)]
    assert max(totals) <= sum(given_sizes) / count + max(given_sizes)


def test_equal_sizes_are_cut_as_evenly_as_whole_numbers_can() -> None:
    assert runs([5] * 8, 4) == [0, 0, 1, 1, 2, 2, 3, 3]
    groups = runs([5] * 10, 3)
    assert sorted(groups.count(n) for n in range(3)) == [3, 3, 4]


def test_a_model_without_experts_or_with_too_few_is_refused_with_what_to_do() -> None:
    with pytest.raises(ModelError, match="needs a mixture of experts") as caught:
        model_layout(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2, "expert")
    assert 'fragment_by = "block"' in caught.value.next
    with pytest.raises(ModelError, match="into 200 fragments by expert"):
        model_layout(deepseek(), 200, "expert")


def test_what_is_shared_by_stacked_experts_is_no_expert() -> None:
    specs = [
        Tensor(name="mlp.experts.up", shape=(4, 3, 2), dtype="float32", section="small"),
        Tensor(name="mlp.experts.scale", shape=(2,), dtype="float32", section="small"),
        Tensor(name="mlp.experts.bias", shape=(4, 2), dtype="float32", section="small"),
        Tensor(name="mlp.experts.mixed", shape=(5, 2), dtype="float32", section="small"),
    ]
    placed = {t.name: t.fragment for t in assign_experts(specs, 3)}
    assert placed["mlp.experts.scale"] == placed["mlp.experts.mixed"] == 0
    assert placed["mlp.experts.bias[0:2]"] == placed["mlp.experts.up[0:2]"] == 1
    assert placed["mlp.experts.bias[2:4]"] == placed["mlp.experts.up[2:4]"] == 2


# ---- theta


@settings(max_examples=8, deadline=None)
@given(fragments=st.integers(2, 12), is_bf16=st.booleans(), seed=st.integers(0, 99))
def test_gather_and_scatter_give_back_the_same_bits(fragments: int, is_bf16: bool, seed: int) -> None:
    model = deepseek(seed).to(torch.bfloat16 if is_bf16 else torch.float32)
    state = ModelState(model, CPU, fragments, "expert")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    theta = state.gather().copy()
    for fragment in range(fragments):
        place = 0
        for spec in state.layout.of_fragment(fragment):
            values = state.theta_of(fragment)[place : place + spec.element_count]
            live = before[spec.source]
            live = live[spec.part.start : spec.part.stop] if isinstance(spec.part, Slice) else live
            assert np.array_equal(values, live.float().reshape(-1).numpy()), spec.name
            place += spec.element_count
    with torch.no_grad():
        for value in model.state_dict().values():
            value.zero_()
    state.scatter()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert np.array_equal(state.theta, theta)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_fragment_moves_its_experts_and_no_others(dtype: torch.dtype) -> None:
    model = deepseek().to(dtype)
    state = ModelState(model, CPU, 6, "expert")
    state.gather()
    before = copy.deepcopy(model.state_dict())
    fragment = 5
    state.theta_of(fragment)[:] = 7.0
    state.scatter(fragment)
    moved = {
        (name, row)
        for name, value in model.state_dict().items()
        for row in range(value.shape[0] if value.dim() == 3 else 0)
        if not torch.equal(value[row], before[name][row])
    }
    held = {(layer, index) for layer, index in experts_by_fragment(state.layout)[fragment]}
    assert moved == {(f"{layer}.experts.{part}", row) for layer, row in held for part in ("gate_up_proj", "down_proj")}
    plain = {n for n, v in model.state_dict().items() if v.dim() < 3 and not torch.equal(v, before[n])}
    assert not plain


def test_a_bfloat16_expert_keeps_what_is_too_small_for_its_type() -> None:
    state = ModelState(deepseek().bfloat16(), CPU, 4, "expert")
    start = state.gather().copy()
    for _ in range(50):
        state.gather(3)
        state.theta_of(3)[:] += np.float32(1e-6)
        state.scatter(3)
    moved = state.gather() - start
    assert np.allclose(moved[-len(state.theta_of(3)) :], 50e-6, atol=2e-7)
    assert not moved[: -len(state.theta_of(3))].any()


def test_holding_values_gives_the_model_its_own_back() -> None:
    model = deepseek()
    state = ModelState(model, CPU, 6, "expert")
    before = copy.deepcopy(model.state_dict())
    with state.holding(np.zeros(len(state.theta), np.float32)):
        assert not any(p.any() for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
