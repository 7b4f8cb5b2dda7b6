import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ciuic.errors import ModelError
from ciuic.job import Job, parse_job
from ciuic.train import models
from ciuic.train.models import build_model

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # read when the library is imported, so also:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def job(**model: object) -> Job:
    return parse_job({"model": model, "data": {"sequence_length": 32}})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_same_seed_builds_the_same_model() -> None:
    first, again, other = (build_model(job(), 256, seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_vocabulary_follows_the_tokenizer() -> None:
    assert build_model(job(), 777, 0).get_input_embeddings().weight.shape == (777, 128)


def test_untrained_model_predicts_by_chance() -> None:
    model = build_model(job(), 256, 0)
    tokens = torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(1))
    assert model.training
    assert model(input_ids=tokens, labels=tokens).loss.item() == pytest.approx(5.55, abs=0.15)


def test_bfloat16_keeps_routers_and_positions_in_single_precision() -> None:
    model = build_model(job(dtype="bfloat16"), 256, 0)
    kinds = {name: tensor.dtype for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    assert kinds["lm_head.weight"] == torch.bfloat16
    assert kinds["model.layers.1.mlp.gate.weight"] == torch.float32
    assert kinds["model.layers.1.mlp.gate.e_score_correction_bias"] == torch.float32
    assert kinds["model.rotary_emb.inv_freq"] == torch.float32
    tokens = torch.zeros(1, 9, dtype=torch.int64)
    assert torch.isfinite(model(input_ids=tokens, labels=tokens).loss)


def test_sequence_longer_than_the_positions_is_refused() -> None:
    with pytest.raises(ModelError, match="at most 31"):
        build_model(job(overrides={"max_position_embeddings": 32}), 256, 0)


def test_model_larger_than_the_memory_is_refused_before_it_is_built() -> None:
    with pytest.raises(ModelError, match=r"deepseek-v3 does not fit on this machine.*671,\d{3},\d{3},\d{3} parameters"):
        build_model(job(preset="deepseek-v3"), 129280, 0)


def test_job_with_its_own_program_has_no_model_to_build() -> None:
    with pytest.raises(ModelError, match="no model for the built-in trainer"):
        build_model(job(entry="mine:main"), 256, 0)


def test_saved_folder_loads_with_its_weights(saved: Path) -> None:
    model = build_model(job(from_pretrained=str(saved)), 256, 0)
    torch.manual_seed(0)
    expected = LlamaForCausalLM(model.config)
    assert torch.equal(model.lm_head.weight, expected.lm_head.weight)
    assert model.training


def test_saved_folder_loads_in_the_jobs_type(saved: Path) -> None:
    assert build_model(job(from_pretrained=str(saved), dtype="bfloat16"), 256, 0).lm_head.weight.dtype == torch.bfloat16


def test_saved_deepseek_comes_back_with_its_expert_biases(tmp_path: Path) -> None:
    model = build_model(job(), 256, 0)
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    bias.copy_(torch.arange(8.0))
    model.save_pretrained(tmp_path / "deepseek")
    loaded = build_model(job(from_pretrained=str(tmp_path / "deepseek")), 256, 9)
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_override_of_a_pretrained_model_is_applied_or_named(saved: Path) -> None:
    model = build_model(job(from_pretrained=str(saved), overrides={"attention_dropout": 0.1}), 256, 0)
    assert model.config.attention_dropout == 0.1
    with pytest.raises(ModelError, match="did you mean 'attention_dropout'"):
        build_model(job(from_pretrained=str(saved), overrides={"attention_dropuot": 0.1}), 256, 0)


def test_override_that_does_not_fit_the_weights_is_refused(saved: Path) -> None:
    with pytest.raises(ModelError, match=r"incomplete|cannot be loaded"):
        build_model(job(from_pretrained=str(saved), overrides={"num_hidden_layers": 3}), 256, 0)
    with pytest.raises(ModelError, match=r"incomplete|cannot be loaded"):
        build_model(job(from_pretrained=str(saved), overrides={"intermediate_size": 80}), 256, 0)


def test_tokenizer_with_more_tokens_than_the_model_is_refused(saved: Path) -> None:
    with pytest.raises(ModelError, match="has 301 tokens, the model 300"):
        build_model(job(from_pretrained=str(saved)), 301, 0)


def test_missing_folder_is_named() -> None:
    with pytest.raises(ModelError, match=r"no folder \./not/here"):
        build_model(job(from_pretrained="./not/here"), 256, 0)


def test_folder_without_safetensors_is_refused(saved: Path) -> None:
    for file in saved.glob("*.safetensors"):
        file.rename(file.with_suffix(".bin"))
    with pytest.raises(ModelError, match="no weights that may be loaded"):
        build_model(job(from_pretrained=str(saved)), 256, 0)


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no config"):
        build_model(job(from_pretrained=str(tmp_path)), 256, 0)


def test_damaged_weights_are_refused(saved: Path) -> None:
    weights = next(saved.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match="cannot be loaded"):
        build_model(job(from_pretrained=str(saved)), 256, 0)


def test_quantised_weights_are_refused(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="quantised"):
        build_model(job(from_pretrained=str(saved)), 256, 0)


def test_remote_code_is_never_run(saved: Path) -> None:
    marker = saved.parent / "ran"
    (saved / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass C: pass\nclass M: pass\n")
    config = json.loads((saved / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="cannot be loaded"):
        build_model(job(from_pretrained=str(saved)), 256, 0)
    assert not marker.exists()


def test_hub_that_cannot_be_reached_is_a_clear_error() -> None:
    with pytest.raises(ModelError, match="nobody/nothing cannot be loaded") as caught:
        build_model(job(from_pretrained="nobody/nothing"), 256, 0)
    assert "reaches the hub" in caught.value.next


@pytest.mark.parametrize("name", ["v7.0", "deepseek-v7", "DeepSeek"])
def test_deepseek_names_that_do_not_exist_list_the_real_ones(name: str) -> None:
    with pytest.raises(ModelError, match="the presets are deepseek-v3-tiny"):
        build_model(job(from_pretrained=name), 256, 0)


def test_preset_given_as_pretrained_is_explained() -> None:
    with pytest.raises(ModelError, match="is a preset"):
        build_model(job(from_pretrained="deepseek-v3-mini"), 256, 0)


def test_memory_check_counts_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 2_000_000})())
    with pytest.raises(ModelError, match=r"2\.9 MB while they are built, 2\.0 MB are free"):
        build_model(job(), 256, 0)
