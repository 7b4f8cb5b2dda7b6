from pathlib import Path

import pytest

from ciuic.doctor.evidence import Evidence
from ciuic.doctor.record import Record
from ciuic.doctor.report.overhead import overheads
from ciuic.doctor.sampling import COST, STEP_TIME
from ciuic.errors import NotFoundError


def _write(folder: Path, *rows: tuple[int, int, int, float, float]) -> None:
    """(rank, optimizer, step, time of a step, cost since the last record) of each record."""
    evidence = Evidence(folder)
    for rank, optimizer, step, step_s, cost_s in rows:
        facts = {STEP_TIME: step_s, COST: cost_s}
        evidence.add(Record(rank=rank, optimizer=optimizer, step=step, time_s=0.0, facts=facts))
    evidence.close([], [])


def test_cost_is_compared_with_the_time_of_all_steps_between_two_looks(tmp_path: Path) -> None:
    _write(tmp_path, (0, 0, 1, 9.0, 5.0), (0, 0, 2, 0.1, 0.002), (0, 0, 12, 0.1, 0.009), (1, 0, 1, 0.1, 0.0))
    (found,) = overheads(tmp_path)
    assert (found.rank, found.steps, found.looked_at) == (0, 11, 2)
    assert found.step_s == pytest.approx(0.1)
    assert found.share == pytest.approx(0.01), "the first record has the start of the program in it"
    assert 0 < found.bytes_per_check < 200


def test_other_optimizers_of_a_rank_are_in_the_cost_of_the_first(tmp_path: Path) -> None:
    _write(tmp_path, (0, 0, 1, 0.1, 0.0), (0, 1, 1, 0.0, 0.0), (0, 0, 2, 0.1, 0.01), (0, 1, 2, 0.0, 0.0))
    (found,) = overheads(tmp_path)
    assert found.steps == 1


def test_a_folder_without_evidence_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="has no evidence"):
        overheads(tmp_path)
