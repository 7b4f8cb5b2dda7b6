import pytest
import torch
from transformers.models.deepseek_v3 import DeepseekV3ForCausalLM

from ciuic.errors import ModelError
from ciuic.train.deepseek import PRESETS, parameter_count, preset_config

PUBLISHED_VOCABULARY = 129280


def built_count(config: object) -> int:
    with torch.device("meta"):
        model = DeepseekV3ForCausalLM(config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_formula_equals_the_model_on_the_meta_device(name: str) -> None:
    config = preset_config(name, vocab_size=256)
    assert parameter_count(config) == built_count(config)


def test_deepseek_v3_has_the_published_number_of_parameters() -> None:
    config = preset_config("deepseek-v3", vocab_size=PUBLISHED_VOCABULARY)
    assert parameter_count(config) == 671_026_404_352
    assert built_count(config) == 671_026_404_352


def test_deepseek_v3_keeps_the_published_rope_and_routing() -> None:
    config = preset_config("deepseek-v3", vocab_size=PUBLISHED_VOCABULARY)
    assert config.rope_parameters["rope_type"] == "yarn"
    assert config.rope_parameters["factor"] == 40
    assert (config.n_group, config.topk_group, config.routed_scaling_factor) == (8, 4, 2.5)


def test_tiny_has_three_quarters_of_a_million_parameters() -> None:
    assert parameter_count(preset_config("deepseek-v3-tiny", vocab_size=256)) == 732_272


@pytest.mark.parametrize("changes", [{"attention_bias": True}, {"tie_word_embeddings": True}, {"n_shared_experts": 3}])
def test_parameter_formula_follows_overrides(changes: dict[str, int | bool]) -> None:
    config = preset_config("deepseek-v3-tiny", 300, changes)
    assert parameter_count(config) == built_count(config)


def test_unknown_deepseek_lists_the_real_ones_and_suggests_the_nearest() -> None:
    with pytest.raises(ModelError) as caught:
        preset_config("deepseek-v3-tiney", vocab_size=256)
    assert all(name in caught.value.cause for name in PRESETS)
    assert "did you mean 'deepseek-v3-tiny'?" in caught.value.next


def test_the_articles_v7_does_not_exist() -> None:
    with pytest.raises(ModelError, match=r"no DeepSeek model named 'v7\.0'"):
        preset_config("v7.0", vocab_size=256)


def test_misspelt_override_is_named_with_the_right_one() -> None:
    with pytest.raises(ModelError, match="did you mean 'num_hidden_layers'"):
        preset_config("deepseek-v3-tiny", 256, {"num_hiden_layers": 2})


def test_vocabulary_cannot_be_overridden_because_it_follows_the_tokenizer() -> None:
    with pytest.raises(ModelError, match="follows the tokenizer"):
        preset_config("deepseek-v3-tiny", 256, {"vocab_size": 1000})


def test_override_of_the_wrong_type_is_refused() -> None:
    with pytest.raises(ModelError, match="not valid") as caught:
        preset_config("deepseek-v3-tiny", 256, {"num_hidden_layers": "three"})
    assert "num_hidden_layers" in caught.value.cause


def test_heads_override_changes_the_key_value_heads_with_it() -> None:
    config = preset_config("deepseek-v3-tiny", 256, {"num_attention_heads": 2})
    assert config.num_key_value_heads == 2


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"n_group": 3}, "equal groups"),
        ({"n_group": 8}, "equal groups of at least 2"),
        ({"n_group": 2, "topk_group": 3}, "topk_group is 3 of 2"),
        ({"num_experts_per_tok": 9}, "cannot choose 9 experts"),
        ({"qk_rope_head_dim": 15}, "even rotary dimension"),
        ({"num_hidden_layers": 0}, "at least 1"),
        ({"num_key_value_heads": 2}, "equal to num_attention_heads"),
    ],
)
def test_numbers_that_do_not_fit_together_are_refused(changes: dict[str, int], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        preset_config("deepseek-v3-tiny", 256, changes)
