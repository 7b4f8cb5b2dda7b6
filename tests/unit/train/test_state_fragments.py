"""Cutting a model into fragments: whole blocks, about equal sizes, and nothing lost between model and theta."""

import copy
from collections import defaultdict

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ciuic.errors import ModelError
from ciuic.ledger.layout import Layout, Tensor, layout_from_dict, make_layout
from ciuic.train.state import ModelState
from ciuic.train.tensors import assign_fragments, model_layout

CPU = torch.device("cpu")
WIDTH = 16


class Transformer(nn.Module):
    """Embedding, equal layers with norms, a head that may be tied."""

    def __init__(self, layers: int = 6, vocabulary: int = 40, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.BatchNorm1d(4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(self.norm(hidden))


def sizes(layout: Layout) -> list[int]:
    return [layout.fragment_shape(f).element_count for f in range(layout.fragment_count)]


def fragments_by_block(layout: Layout) -> dict[str, set[int]]:
    found: dict[str, set[int]] = defaultdict(set)
    for tensor in layout.tensors:
        if tensor.section != "counter":
            levels = tensor.name.split(".")
            found[".".join(levels[:2]) if levels[0] == "layers" else levels[0]].add(tensor.fragment)
    return found


def test_layers_stay_together_strided_by_depth_and_one_fragment_is_the_default() -> None:
    layout, _ = model_layout(Transformer(layers=6, vocabulary=10), 3)
    where = fragments_by_block(layout)
    assert all(len(fragments) == 1 for fragments in where.values())
    assert [min(where[f"layers.{n}"]) for n in range(6)] == [0, 1, 2, 0, 1, 2]
    assert {t.fragment for t in model_layout(Transformer())[0].tensors} == {0}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fragments", [2, 3, 4])
def test_an_embedding_larger_than_a_layer_is_balanced_by_layers(fragments: int, tied: bool) -> None:
    model = Transformer(layers=12, vocabulary=300, tied=tied)
    layout, tensors = model_layout(model, fragments)
    block = sum(t.numel() for n, t in tensors.items() if n.startswith("layers.0.") and t.is_floating_point())
    assert max(sizes(layout)) - min(sizes(layout)) <= block
    assert sum(sizes(layout)) == sum(t.numel() for t in tensors.values() if t.is_floating_point())


def test_one_layer_is_cut_into_its_parts_when_the_blocks_are_too_few() -> None:
    layout, _ = model_layout(Transformer(layers=1, vocabulary=40), 4)
    assert min(sizes(layout)) > 0
    assert len(fragments_by_block(layout)["layers.0"]) > 1
    # parts that belong together stay so: no scale is apart from its running mean
    norm = {t.fragment for t in layout.tensors if t.name.startswith("layers.0.1.") and t.section != "counter"}
    assert len(norm) == 1


def test_more_fragments_than_tensors_are_refused() -> None:
    assert sizes(model_layout(nn.Linear(3, 5), 2)[0]) == [15, 5]
    for fragments in (0, 3, 257):
        with pytest.raises(ModelError, match=f"into {fragments} fragments"):
            model_layout(nn.Linear(3, 5), fragments)


def test_a_model_without_values_is_refused_by_the_name_of_a_tensor() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 5)
    with pytest.raises(ModelError, match="weight has no values"):
        ModelState(model, CPU)


names = st.lists(st.sampled_from(["layers", "0", "1", "2", "mlp", "norm", "w"]), min_size=1, max_size=5).map(".".join)


@given(shapes=st.dictionaries(names, st.integers(1, 10_000), min_size=1, max_size=30), fragments=st.integers(1, 30))
def test_any_names_and_sizes_give_fragments_without_a_gap(shapes: dict[str, int], fragments: int) -> None:
    specs = [Tensor(name=name, shape=(size,), dtype="float32", section="small") for name, size in shapes.items()]
    if fragments > len(specs):
        with pytest.raises(ModelError):
            assign_fragments(specs, fragments)
        return
    placed = assign_fragments(specs, fragments)
    assert [t.name for t in placed] == list(shapes)
    layout = make_layout(placed, fragments)
    total, largest = sum(shapes.values()), max(shapes.values())
    assert max(sizes(layout)) <= total / fragments + max(largest, total / fragments)


# ---- theta


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_theta_is_fragment_after_fragment_and_its_parts_are_views(dtype: torch.dtype) -> None:
    model = Transformer().to(dtype)
    state = ModelState(model, CPU, 3)
    theta = state.gather().copy()
    assert np.array_equal(np.concatenate([state.theta_of(f) for f in range(3)]), theta)
    assert [len(state.theta_of(f)) for f in range(3)] == sizes(state.layout)
    for fragment in range(3):
        place = 0
        for tensor in state.layout.of_fragment(fragment):
            live = model.get_parameter(tensor.name) if tensor.trainable else model.get_buffer(tensor.name)
            part = state.theta_of(fragment)[place : place + tensor.element_count]
            assert np.array_equal(part, live.detach().float().reshape(-1).numpy()), tensor.name
            place += tensor.element_count
    state.theta_of(1)[:] = 2.0
    assert (state.theta == 2.0).sum() >= len(state.theta_of(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_fragment_is_gathered_and_scattered_without_the_others(dtype: torch.dtype) -> None:
    model = Transformer().to(dtype)
    state = ModelState(model, CPU, 3)
    state.gather()
    before = state.theta.copy()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    part = state.gather(1)
    assert part.base is not None
    for fragment in range(3):
        moved = state.theta_of(fragment) - before[span(state, fragment)]
        buffers = sum(t.element_count for t in state.layout.of_fragment(fragment) if not t.trainable)
        expected = 0.0 if fragment != 1 else 1.0
        assert np.allclose(moved[: len(moved) - buffers], expected, atol=1e-2)
    wanted = {name: t.detach().clone() for name, t in model.state_dict().items()}
    state.theta[:] = 0.5
    state.scatter(2)
    fragments = {t.name: t.fragment for t in state.layout.tensors if t.section != "counter"}
    for name, fragment in fragments.items():
        now = model.state_dict()[name]
        assert (now == 0.5).all() if fragment == 2 else torch.equal(now, wanted[name]), name


def span(state: ModelState, fragment: int) -> slice:
    counts = sizes(state.layout)
    return slice(sum(counts[:fragment]), sum(counts[: fragment + 1]))


def test_a_bfloat16_model_keeps_what_is_too_small_in_each_fragment() -> None:
    model = Transformer().bfloat16()
    state = ModelState(model, CPU, 3)
    start = state.gather().copy()
    for number in range(1, 100):
        fragment = number % 3
        state.gather(fragment)
        state.theta_of(fragment)[:] += np.float32(1e-5)
        state.scatter(fragment)
    assert np.allclose(state.gather() - start, 33e-5, atol=1e-6)


def test_holding_leaves_theta_and_the_model_as_they_were_whatever_is_gathered() -> None:
    model = Transformer()
    state = ModelState(model, CPU, 3)
    state.gather()
    with torch.no_grad():
        model.norm.weight += 1  # not gathered
    state.theta_of(0)[:] = 3.0  # not scattered
    theta, wanted = state.theta.copy(), copy.deepcopy(model.state_dict())
    with state.holding(np.zeros(len(theta), np.float32)):
        assert not model.norm.weight.any()
        assert not model.embed.weight.any()
    assert np.array_equal(state.theta, theta)
    for name, value in model.state_dict().items():
        assert torch.equal(value, wanted[name]), name


def test_the_layout_is_read_back_from_its_own_form() -> None:
    layout, _ = model_layout(Transformer(), 3)
    assert layout_from_dict(msgspec.to_builtins(layout)) == layout
    assert layout.digest != model_layout(Transformer(), 2)[0].digest
