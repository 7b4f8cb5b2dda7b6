"""Everything is seeded, what came too late is told, and equal programs draw equal numbers."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from ciuic.errors import UsageError
from ciuic.torch import deterministic
from ciuic.train import deterministic as room


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The switches are of the whole process."""
    for name in (room.CUBLAS, room.HASH_SEED):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    before = torch.are_deterministic_algorithms_enabled()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32
    yield
    torch.use_deterministic_algorithms(before)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = cudnn
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


class Draws(Dataset[list[float]]):
    """Each sample is its number and what the generators of its worker draw."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> list[float]:
        return [float(index), random.random(), float(np.random.rand()), float(torch.rand(()))]


def drawn() -> list[float]:
    return [
        random.random(),
        float(np.random.rand()),
        float(torch.rand(())),
        float(torch.nn.Linear(2, 2).weight.detach()[0, 0]),
    ]


def test_one_seed_gives_the_same_numbers_from_all_generators_and_another_does_not() -> None:
    numbers = []
    for seed in (5, 5, 6):
        deterministic(seed)
        numbers.append(drawn())
    assert numbers[0] == numbers[1]
    assert all(one != other for one, other in zip(numbers[0], numbers[2], strict=True))


def test_ranks_are_equal_until_they_are_told_to_differ() -> None:
    numbers = []
    for rank in (0, 1, 0):
        report = deterministic(5)
        before = drawn()
        report.differ_by_rank(rank)
        numbers.append((before, drawn()))
    assert numbers[0][0] == numbers[1][0]
    assert numbers[0][1] != numbers[1][1]
    assert numbers[0] == numbers[2]


def test_the_rank_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    report = deterministic(5)
    assert report.differ_by_rank() == report.differ_by_rank(3) != report.differ_by_rank(2)


def test_workers_of_a_loader_draw_the_same_numbers_each_time() -> None:
    passes = []
    for _ in range(2):
        options = deterministic(5).loader_options()
        torch.rand(3)  # what the program draws in between makes no difference
        loader = DataLoader(Draws(), batch_size=None, shuffle=True, num_workers=2, **options)
        passes.append(list(loader))
    assert passes[0] == passes[1]
    assert [sample[0] for sample in passes[0]] != sorted(sample[0] for sample in passes[0])
    assert len({sample[1] for sample in passes[0]}) == 8


def test_operations_without_a_repeatable_algorithm_raise_or_warn() -> None:
    deterministic(5)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    report = deterministic(5, warn_only=True)
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert any("warn" in entry for entry in report.remains)
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    assert not torch.backends.cudnn.allow_tf32


def test_cublas_gets_a_workspace_that_repeats_and_a_good_one_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(room.CUBLAS, ":0:0")
    deterministic(5)
    assert os.environ[room.CUBLAS] == ":4096:8"
    monkeypatch.setenv(room.CUBLAS, ":16:8")
    deterministic(5)
    assert os.environ[room.CUBLAS] == ":16:8"


def test_a_gpu_that_was_used_before_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(room.CUBLAS, "")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert any("CUDA has been used already" in entry for entry in deterministic(5).too_late)
    assert not any("CUDA has been used already" in entry for entry in deterministic(5).too_late)


@pytest.mark.parametrize(
    ("started_with", "late"),
    [(b"A=1\0B=2", True), (b"PYTHONHASHSEED=random\0", True), (b"A=1\0PYTHONHASHSEED=7\0", False)],
)
def test_the_hash_seed_counts_as_the_process_was_started_with(
    started_with: bytes, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "environ").write_bytes(started_with)
    monkeypatch.setattr(room, "_OWN_ENVIRONMENT", tmp_path / "environ")
    monkeypatch.setenv("PYTHONHASHSEED", "1")  # too late: the process has its seed
    report = deterministic(7)
    assert any("PYTHONHASHSEED" in entry for entry in report.too_late) is late
    assert os.environ["PYTHONHASHSEED"] == ("7" if late else "1")


def test_linux_tells_what_a_process_was_started_with() -> None:
    code = (
        "import os; os.environ['PYTHONHASHSEED'] = '1'\n"
        "entries = open('/proc/self/environ', 'rb').read().split(b'\\0')\n"
        "print([entry for entry in entries if entry.startswith(b'PYTHONHASHSEED=')])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "3"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[b'PYTHONHASHSEED=3']", done.stderr


def test_the_report_names_the_seed_and_three_lists() -> None:
    report = deterministic(5)
    text = str(report)
    assert text.startswith("deterministic, seed 5\nset:\n  - ")
    assert "may still differ:\n  - " in text
    assert all(f"  - {entry}" in text for entry in (*report.done, *report.too_late, *report.remains))
    assert not any("over ranks" in entry for entry in report.remains)


def test_in_a_world_sums_over_ranks_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert any("over ranks" in entry for entry in deterministic(5).remains)


@pytest.mark.parametrize("seed", [-1, 2**32, 1.0, True, "5"])
def test_what_is_no_seed_is_refused(seed: object) -> None:
    with pytest.raises(UsageError, match="not a seed"):
        deterministic(seed)  # ty: ignore[invalid-argument-type]
