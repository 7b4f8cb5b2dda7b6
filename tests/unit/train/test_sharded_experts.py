"""Fragments by expert of a model that is sharded over ranks."""

from pathlib import Path

import numpy as np
import pytest
import sharded_experts as cases
import torch
from ranks import on_ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_of_a_sharded_model_go_out_and_come_back_as_from_one_process(tmp_path: Path, dtype: torch.dtype) -> None:
    expected = cases.alone(dtype)
    first, second = on_ranks(cases.together, tmp_path, dtype)
    assert first["layout"] == second["layout"] == expected["layout"]
    assert np.array_equal(first["before"], expected["before"])
    assert np.array_equal(first["after"], expected["after"])
    assert not np.array_equal(first["after"], first["before"])
    assert first["held"] == second["held"] == [False]
    for name, value in expected["values"].items():
        assert np.array_equal(first["values"][name], value), name
        assert np.array_equal(second["values"][name], value), name
    # both ranks read the same here: what rank 0 counts, times their number
    assert first["accesses"] == [2 * x if x > 0 else x for x in expected["accesses"]]
    assert max(first["accesses"]) > 0
