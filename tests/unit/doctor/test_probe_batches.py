from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
)

from ciuic.doctor.probe.batches import WHOLE_BYTES, batch_bytes, batch_digest, sample
from ciuic.doctor.probe.loaders import contents, describe, is_shuffled, length_of

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=3)


@given(SHAPES, st.integers(0, 1 << 30), st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]))
def test_equal_batches_have_equal_digests_and_one_changed_element_another(shape, seed, kind):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(kind)
    same = {"x": values.clone(), "y": [torch.ones(2)]}
    assert batch_digest(same) == batch_digest({"x": values, "y": [torch.ones(2)]})
    other = values.clone().reshape(-1)
    other[0] = ~other[0] if kind is torch.bool else other[0] + 3
    assert batch_digest({"x": other.reshape(shape), "y": [torch.ones(2)]}) != batch_digest(same)


def test_large_batches_are_sampled_over_their_whole_length():
    large = torch.zeros(WHOLE_BYTES)
    changed = large.clone()
    changed[-64:] += 1
    assert batch_digest(large) != batch_digest(changed)
    assert len(sample(large.reshape(64, -1).t())) <= 2048, "a transposed tensor is not copied whole"


def test_what_cannot_be_looked_at_has_no_digest():
    assert batch_digest(object()) is None
    assert batch_digest([]) is None
    assert batch_digest(torch.empty(3, device="meta")) is None
    assert batch_digest(["a text"]) != batch_digest(["another"])
    assert batch_bytes((torch.zeros(4), {"m": torch.zeros(2, dtype=torch.int64)})) == 32


def test_no_random_number_is_drawn_and_nothing_is_written():
    values = torch.randn(4, 4)
    state, version = torch.get_rng_state(), values._version
    batch_digest({"x": values})
    assert torch.equal(state, torch.get_rng_state())
    assert values._version == version


class _Names(Dataset):
    def __init__(self, names: list[str]) -> None:
        self.names, self.read = names, 0

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> str:
        self.read += 1
        return self.names[index]


class _Stream(IterableDataset):
    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Any:
        return iter(range(10))


def test_a_loader_tells_its_shares_and_what_its_data_hold_without_reading_a_sample():
    data = _Names([f"f{i}" for i in range(40)])
    sampler = DistributedSampler(data, num_replicas=2, rank=1, shuffle=True, seed=5)
    told = describe(DataLoader(data, batch_size=4, sampler=sampler))
    assert {name: told[name] for name in ("length", "split", "replicas", "place", "seed", "shuffle", "samples")} == {
        "length": 5, "split": "index", "replicas": 2, "place": 1, "seed": 5, "shuffle": True, "samples": 40,
    }  # fmt: skip
    assert list(told["contents"]) == ["names"]
    assert data.read == 0


def test_contents_of_shards_differ_and_of_equal_sets_do_not():
    one, two = (Subset(_Names(list("abcdef")), list(range(rank, 6, 2))) for rank in (0, 1))
    assert contents(one)["indices"] != contents(two)["indices"]
    assert contents(one) == contents(Subset(_Names(list("abcdef")), [0, 2, 4]))
    tensors = TensorDataset(torch.randn(6, 3), torch.arange(6))
    assert {name: told[1] for name, told in contents(tensors).items()} == {"tensors.0": 1, "tensors.1": 0}
    assert contents(TensorDataset(torch.zeros(6, 3))) == {}, "constants say nothing"


def test_a_stream_is_not_asked_for_its_length():
    loader = DataLoader(_Stream(), batch_size=2)
    assert length_of(loader) == -1
    assert loader._IterableDataset_len_called is None
    assert not is_shuffled(loader)
    assert describe(loader)["split"] == ""


def test_shuffling_is_seen_through_a_batch_sampler():
    data = TensorDataset(torch.arange(8))
    assert is_shuffled(DataLoader(data, batch_sampler=torch.utils.data.BatchSampler(RandomSampler(data), 2, False)))
    assert not is_shuffled(DataLoader(data, batch_size=2))


def test_numbers_of_numpy_count_as_batches():
    assert batch_digest(np.arange(6)) == batch_digest(np.arange(6))
    assert batch_digest(np.arange(6)) != batch_digest(np.arange(6)[::-1])
