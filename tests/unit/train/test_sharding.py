"""Which sharded models are refused, in words that help, and sharding by the job."""

from pathlib import Path

import numpy as np
import pytest
import sharded_cases as cases
import sharded_deepseek as deepseek
from ranks import on_ranks

from ciuic.errors import JobFileError, render_error
from ciuic.job import parse_job


def test_what_cannot_be_synchronised_is_refused_with_its_reason(tmp_path: Path) -> None:
    told, other = on_ranks(cases.refusals, tmp_path)
    assert told == other
    assert {name for name, text in told.items() if text == "accepted"} == {"plain", "good", "frozen ignored"}
    assert "FSDP1" in told["fsdp1"]
    assert "fully_shard" in told["fsdp1"]
    assert "one rank" in told["one rank"]
    assert "nodes.ranks" in told["one rank"]
    assert "only parts of the model are sharded" in told["half"]
    assert "norm.weight is trained but not sharded" in told["ignoring"]
    assert "tensor parallelism" in told["tensor parallel"]
    assert "on ranks [0, 1]" in told["more ranks"]
    assert "StridedShard" in told["both"]


def test_the_job_shards_blocks_of_two_types_and_the_optimizer_follows(tmp_path: Path) -> None:
    first, second = on_ranks(cases.job_shards, tmp_path)
    assert first == second
    assert first["all known"]
    assert first["same lists"] == [True, True]
    assert first["blocks"] == {"FSDPBlock"}
    assert "already made steps" in first["refused"]


def test_a_job_cannot_shard_over_one_rank() -> None:
    job = {"name": "x", "nodes": {"sharding": "fsdp2", "ranks": 2}}
    assert parse_job(job).nodes.sharding == "fsdp2"
    with pytest.raises(JobFileError) as caught:
        parse_job({"name": "x", "nodes": {"sharding": "fsdp2"}})
    assert "nodes.ranks is 1" in render_error(caught.value)


def test_deepseek_in_bfloat16_with_fp32_routers_trains_in_parts_as_it_trains_whole(tmp_path: Path) -> None:
    expected = deepseek.alone()
    first, second = on_ranks(deepseek.together, tmp_path)
    assert first["layout"] == second["layout"] == expected["layout"]
    assert first["losses"] == second["losses"] == pytest.approx(expected["losses"], abs=2e-3)
    assert np.abs(first["theta"] - expected["theta"]).mean() < 1e-4  # AdamW moves each parameter by up to 3e-3
    layers = ["FSDPDeepseekV3DecoderLayer"] * 2
    assert first["groups"] == [*layers, "FSDPDeepseekV3ForCausalLM", "FSDPDeepseekV3TopkRouter"]
