"""Which tensors of a model the ledger holds, where, and that nothing is lost between them and theta."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from ciuic.codec import NumpyVectors
from ciuic.errors import ModelError
from ciuic.ledger.layout import MAX_COUNTERS
from ciuic.train.state import ModelState
from ciuic.train.torch_codec import TorchVectors

CPU = torch.device("cpu")


class Block(nn.Module):
    """A router, experts in one tensor, and a bias that training changes without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 8, bias=False)
        self.gate.register_buffer("e_score_correction_bias", torch.zeros(8))
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.randn(8, 32, 64))
        self.norm = nn.LayerNorm(64)


class Model(nn.Module):
    """One of everything."""

    def __init__(self, *, head_first: bool = False) -> None:
        super().__init__()
        if head_first:
            self.head = nn.Linear(64, 100, bias=False)
        self.embed = nn.Embedding(100, 64)
        self.block = Block()
        self.square = nn.Linear(80, 80)
        self.batch_norm = nn.BatchNorm1d(5)
        if not head_first:
            self.head = nn.Linear(64, 100, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(70, 70)
        for parameter in self.frozen.parameters():
            parameter.requires_grad = False
        self.register_buffer("cache", torch.ones(9), persistent=False)
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("none_yet", torch.zeros(0))
        self.empty = nn.Parameter(torch.zeros(0, 5))


def sections(model: nn.Module) -> dict[str, str]:
    return {t.name: t.section for t in ModelState(model, CPU).layout.tensors}


def test_each_tensor_that_training_changes_has_its_section_and_no_other_is_there() -> None:
    model = Model()
    model.register_buffer("rotation", torch.ones(2, dtype=torch.complex64))
    assert sections(model) == {
        "embed.weight": "coded",
        "block.gate.weight": "small",  # a router, whatever its size
        "block.experts.gate_up_proj": "coded",
        "block.norm.weight": "small",
        "block.norm.bias": "small",
        "square.weight": "coded",
        "square.bias": "small",
        "batch_norm.weight": "small",
        "batch_norm.bias": "small",
        "block.gate.e_score_correction_bias": "buffer",
        "batch_norm.running_mean": "buffer",
        "batch_norm.running_var": "buffer",
        "batch_norm.num_batches_tracked": "counter",
    }


@pytest.mark.parametrize(
    ("name", "is_router"),
    [("gate", True), ("router", True), ("gate_proj", False), ("aggregate", False), ("mlp_gate", False)],
)
def test_routers_are_known_by_their_names(name: str, is_router: bool) -> None:
    model = nn.ModuleDict({name: nn.Linear(100, 100, bias=False)})
    assert sections(model)[f"{name}.weight"] == ("small" if is_router else "coded")


@pytest.mark.parametrize("head_first", [False, True])
def test_tied_parameters_are_there_once_and_by_rows_whichever_name_comes_first(head_first: bool) -> None:
    layout = ModelState(Model(head_first=head_first), CPU).layout
    tied = [t for t in layout.tensors if t.name in ("embed.weight", "head.weight")]
    assert len(tied) == 1
    assert tied[0].row_aligned


def test_embeddings_and_experts_are_by_rows_and_nothing_else() -> None:
    layout = ModelState(Model(), CPU).layout
    assert {t.name for t in layout.tensors if t.row_aligned} == {"embed.weight", "block.experts.gate_up_proj"}
    assert ModelState(nn.Embedding(100, 64), CPU).layout.tensors[0].row_aligned


def test_the_layout_does_not_depend_on_the_values_or_the_instance() -> None:
    torch.manual_seed(1)
    first = ModelState(Model(), CPU).layout
    torch.manual_seed(2)
    assert ModelState(Model(), CPU).layout.digest == first.digest
    assert ModelState(Model().bfloat16(), CPU).layout.digest != first.digest


def test_frozen_parameters_are_not_part_of_the_digest() -> None:
    model, other = Model(), Model()
    other.frozen = nn.Linear(3, 3).requires_grad_(requires_grad=False)
    assert ModelState(model, CPU).layout.digest == ModelState(other, CPU).layout.digest


def test_a_model_without_anything_to_train_is_refused() -> None:
    with pytest.raises(ModelError, match="no trainable parameter"):
        ModelState(nn.Linear(3, 3).requires_grad_(requires_grad=False), CPU)
    with pytest.raises(ModelError):
        ModelState(nn.Module(), CPU)


# ---- theta


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gather_and_scatter_move_every_value_and_nothing_else(dtype: torch.dtype) -> None:
    model = Model().to(dtype)
    state = ModelState(model, CPU)
    before = parameters(model)
    theta = state.gather()
    assert theta.dtype == np.float32
    assert len(theta) == state.layout.fragment_shape(0).element_count
    kept = theta.copy()
    state.scatter()
    assert_equal(parameters(model), before)
    theta += 1
    state.scatter()
    after = parameters(model)
    for tensor in state.layout.of_fragment(0):
        assert not torch.equal(after[tensor.name], before[tensor.name]), tensor.name
    for name in ("frozen.weight", "frozen.bias", "mask", "batch_norm.num_batches_tracked"):
        assert torch.equal(after[name], before[name])
    theta[:] = kept
    state.scatter()
    assert_equal(parameters(model), before)


def test_theta_lies_in_storage_order() -> None:
    model = Model()
    state = ModelState(model, CPU)
    theta, place = state.gather(), 0
    values = parameters(model)
    for tensor in state.layout.of_fragment(0):
        part = theta[place : place + tensor.element_count]
        assert np.array_equal(part, values[tensor.name].numpy().reshape(-1)), tensor.name
        assert state.layout.name_at(0, place) == f"{tensor.name}[0]"
        place += tensor.element_count
    assert place == len(theta)


def test_theta_and_flat_are_one_memory() -> None:
    state = ModelState(Model(), CPU)
    state.gather()[3] = 7.0
    assert state.flat[3] == 7.0
    assert isinstance(state.vectors, NumpyVectors)


def test_the_model_trains_on_after_a_scatter() -> None:
    torch.manual_seed(0)
    model = nn.Linear(70, 70)
    state = ModelState(model, CPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        state.gather()
        state.theta[:] = 1.0
        state.scatter()
        assert (model.weight == 1).all()
        model(torch.ones(1, 70)).sum().backward()
        optimizer.step()
        assert not (model.weight == 1).any()


def test_scattering_into_a_tied_model_keeps_it_tied() -> None:
    model = Model()
    state = ModelState(model, CPU)
    state.gather()
    state.theta[:] = 0.25
    state.scatter()
    assert model.head.weight is model.embed.weight
    assert (model.head.weight == 0.25).all()


def test_a_model_holds_other_values_only_for_a_while_also_when_something_fails() -> None:
    model = Model()
    state = ModelState(model, CPU)
    state.gather()
    before = parameters(model)
    zeros = np.zeros(len(state.theta), np.float32)

    def fail() -> None:
        assert not model.embed.weight.any()
        raise KeyError

    with pytest.raises(KeyError), state.holding(zeros):
        fail()
    assert_equal(parameters(model), before)
    assert np.array_equal(state.theta, ModelState(model, CPU).gather())


# ---- models of lower precision


def test_what_is_too_small_for_bfloat16_is_kept_in_theta() -> None:
    model = nn.Linear(70, 70).bfloat16()
    state = ModelState(model, CPU)
    start = state.gather().copy()
    for number in range(1, 200):
        state.theta[:] += np.float32(1e-5)  # an entry: far below the last bit of a bfloat16
        state.scatter()
        assert np.allclose(state.gather(), start + number * 1e-5, atol=1e-6)
    assert np.allclose(model.weight.detach().float().numpy().reshape(-1), state.theta[:4900], rtol=2**-8, atol=1e-6)


def test_training_moves_theta_by_what_it_changed_in_the_model() -> None:
    model = nn.Linear(70, 70).bfloat16()
    state = ModelState(model, CPU)
    state.gather()
    state.theta[:] += np.float32(1e-5)
    state.scatter()
    before, weight = state.gather().copy(), model.weight.detach().clone()
    with torch.no_grad():
        model.weight += 0.5
    moved = (model.weight.detach().float() - weight.float()).numpy().reshape(-1)
    assert np.allclose(state.gather()[:4900] - before[:4900], moved, atol=1e-6)
    assert np.array_equal(state.gather()[4900:], before[4900:])


def test_a_model_of_mixed_precision_has_one_theta() -> None:
    model = nn.ModuleDict({"low": nn.Linear(70, 70).bfloat16(), "full": nn.Linear(70, 70)})
    state = ModelState(model, CPU)
    values = vector_of(len(state.gather()))
    state.theta[:] = values
    state.scatter()
    assert np.array_equal(state.gather(), values)
    with state.holding(np.zeros(len(values), np.float32)):
        assert not model["low"].weight.any()
        assert not model["full"].weight.any()
    assert np.array_equal(state.gather(), values)


def vector_of(count: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=count).astype(np.float32)


# ---- frozen parameters


def frozen_digest(model: nn.Module) -> str:
    return ModelState(model, CPU).frozen_digest


def test_frozen_parameters_have_a_digest_of_their_own() -> None:
    model = Model()
    digest = frozen_digest(model)
    assert len(digest) == 32
    assert frozen_digest(copy.deepcopy(model)) == digest
    with torch.no_grad():
        model.embed.weight += 1  # trained: every node gets it from the ledger
    assert frozen_digest(model) == digest
    with torch.no_grad():
        model.frozen.weight[3, 4] += 1e-6
    assert frozen_digest(model) != digest
    assert frozen_digest(nn.Linear(3, 3)) == ""


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_parameters_of_any_shape_have_a_digest(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    model = nn.Linear(3, 3)
    model.scale = nn.Parameter(torch.ones(shape, dtype=dtype), requires_grad=False)
    assert frozen_digest(model)


# ---- counters


def test_counters_take_the_larger_value_in_layout_order() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model.register_buffer("steps", torch.tensor([[5, 1], [7, 0]], dtype=torch.int32))
    state = ModelState(model, CPU)
    assert [t.name for t in state.layout.counters()] == ["0.num_batches_tracked", "1.num_batches_tracked", "steps"]
    model(torch.randn(4, 2))
    assert state.counters() == (1, 1, 5, 1, 7, 0)
    state.raise_counters((9, 0, 4, 3, 7, 2))
    assert state.counters() == (9, 1, 5, 3, 7, 2)
    assert model.steps.tolist() == [[5, 3], [7, 2]]
    assert model.steps.dtype == torch.int32
    assert int(model[0].num_batches_tracked) == 9


def test_integer_tables_that_are_too_large_to_be_counters_stay_at_home() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
    model.register_buffer("table", torch.zeros(MAX_COUNTERS, dtype=torch.int64))
    assert [t.name for t in ModelState(model, CPU).layout.counters()] == ["steps"]


def test_a_copy_of_a_model_has_the_same_theta() -> None:
    model = Model()
    assert np.array_equal(ModelState(copy.deepcopy(model), CPU).gather(), ModelState(model, CPU).gather())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_model_on_a_gpu_has_its_vectors_on_the_host_or_there(where: str) -> None:
    model = Model()
    expected = ModelState(model, CPU).gather().copy()
    state = ModelState(model.to("cuda"), torch.device(where))
    assert isinstance(state.vectors, TorchVectors if where == "cuda" else NumpyVectors)
    assert np.array_equal(state.vectors.to_host(state.gather()), expected)
    state.theta[:] = 1.0
    state.scatter()
    assert (model.embed.weight == 1).all()
