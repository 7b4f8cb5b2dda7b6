"""Experts by the names of tensors."""

import pytest

from ciuic.ledger.experts import describe_experts, experts_by_fragment, parse_expert
from ciuic.ledger.layout import Slice, Tensor, make_layout


@pytest.mark.parametrize(
    ("name", "expert"),
    [
        ("model.layers.1.mlp.experts.gate_up_proj", ("model.layers.1.mlp", None)),
        ("model.layers.1.mlp.experts.12.up_proj.weight", ("model.layers.1.mlp", 12)),
        ("experts.up", ("", None)),
        ("layers.0.experts.2.0.weight", ("layers.0", 2)),
        ("model.layers.1.mlp.shared_experts.up_proj.weight", None),
        ("model.layers.1.mlp.gate.weight", None),
        ("model.layers.1.mlp.experts", None),
        ("model.layers.1.mlp.experts.3", None),
    ],
)
def test_an_expert_is_known_by_its_layer_and_index(name: str, expert: tuple[str, int | None] | None) -> None:
    assert parse_expert(name) == expert


def test_experts_of_each_fragment_as_slices_and_as_modules() -> None:
    def tensor(name: str, fragment: int, part: Slice | None = None) -> Tensor:
        more = {} if part is None else {"part": part}
        return Tensor(name=name, shape=(2, 5), dtype="float32", section="small", fragment=fragment, **more)

    parts = [Slice(of="a.experts.up", start=2 * n, stop=2 * n + 2, rows=4) for n in range(2)]
    tensors = [tensor(part.name, n + 1, part) for n, part in enumerate(parts)]
    tensors += [tensor("b.experts.7.up.weight", 1), tensor("b.experts.7.down.weight", 1), tensor("norm", 0)]
    found = experts_by_fragment(make_layout(tensors, 3))
    assert found == [frozenset(), {("a", 0), ("a", 1), ("b", 7)}, {("a", 2), ("a", 3)}]
    assert [describe_experts(experts) for experts in found] == ["", "experts 0-1, 7", "experts 2-3"]
    assert describe_experts({("a", 4), ("b", 4)}) == "expert 4"
