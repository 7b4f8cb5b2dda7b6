"""What CiuicNodeNetwork understands, without a hub."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from ciuic.errors import CertificateError, UsageError
from ciuic.job import Job, parse_job
from ciuic.net.messages import NodeInfo
from ciuic.network import CiuicNodeNetwork, job_of
from ciuic.network_handles import NetworkNode, claims_of

PRESET = {"model": {"preset": "deepseek-v3-mini"}}


def test_a_model_is_a_preset_a_folder_a_job_or_says_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('name = "x"\n[train]\nsamples = 5\n')
    assert job_of("deepseek-v3-mini", None) == PRESET
    assert job_of("deepseek-ai/DeepSeek-V3", None) == {"model": {"from_pretrained": "deepseek-ai/DeepSeek-V3"}}
    assert job_of(tmp_path, None) == {"model": {"from_pretrained": str(tmp_path)}}
    assert parse_job(job_of(tmp_path / "job.toml", None)).train.samples == 5
    assert job_of({"name": "x"}, None) == {"name": "x"}
    assert parse_job(job_of(parse_job(PRESET), None)) == parse_job(PRESET)
    assert job_of(SimpleNamespace(preset="deepseek-v3-mini", requirements={"gpus": 8}), None) == PRESET
    assert parse_job(job_of(Job(), None)) == Job()


def test_a_data_set_is_filled_in_once() -> None:
    assert job_of("p", "corpus/*.txt")["data"] == {"path": "corpus/*.txt"}
    assert job_of({"data": {"tokenizer": "byte"}}, "a.txt")["data"] == {"tokenizer": "byte", "path": "a.txt"}
    with pytest.raises(UsageError, match="given twice"):
        job_of({"data": {"path": "a.txt"}}, "b.txt")


@pytest.mark.parametrize("model", [object(), 5, None, SimpleNamespace(preset="a", from_pretrained="b")])
def test_what_cannot_be_sent_to_other_machines_is_refused_with_a_way(model: object) -> None:
    with pytest.raises(UsageError, match="cannot be sent") as refused:
        job_of(model, None)
    assert "ciuic.join()" in refused.value.next


def test_specs_are_claims_with_units() -> None:
    assert claims_of({"gpu": 8, "bandwidth": 10}) == {"gpu": 8.0, "bandwidth_gbit_s": 10.0}
    for wrong in (True, "8", -1, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="is not a claim"):
            claims_of({"gpu": wrong})  # type: ignore[dict-item]


def test_a_node_reads_like_the_mapping_of_its_claims_and_measurements() -> None:
    node = NetworkNode(location="us-west", specs=claims_of({"gpu": 8, "bandwidth": 10}))
    assert dict(node) == {"gpu_capacity": 8.0, "bandwidth": 10.0, "measured": {}, "status": "expected"}
    assert repr(node) == "NetworkNode('us-west', expected, gpu=8, bandwidth_gbit_s=10)"
    assert NetworkNode(location="a", specs={"bandwidth": 5.0})["bandwidth"] == 5.0
    assert node.link.rtt_s is None
    measured = {"rtt_s": 0.1, "up_streams": 4.0, "up_bits_per_s": 1e6}
    node.infos = [NodeInfo(node_id="us-west-2", location="us-west", state="training", measured=measured)]
    assert (node["status"], node["measured"], node.node_id) == ("training", measured, "us-west-2")
    assert (node.link.streams, node.link.down_bits_per_s) == (4, None)
    assert node["gpu_capacity"] == 8.0, "the node claims nothing itself"
    with pytest.raises(KeyError):
        node["colour"]


def test_a_token_is_not_shown_with_its_node() -> None:
    node = NetworkNode(location="us-west", token="ciuic1.secret", hub_url="https://hub:1", specs={"gpu": 8.0})
    assert "secret" not in repr(node) + node.join_command
    assert node.join_command == "ciuic node join https://hub:1 --location us-west --claim gpu=8"


def test_without_a_hub_it_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CertificateError) as missing:
        CiuicNodeNetwork(tmp_path)
    assert "ciuic hub start" in missing.value.next
