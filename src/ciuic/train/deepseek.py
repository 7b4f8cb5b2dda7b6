"""DeepSeek-V3 presets: from one that two processor cores train in a minute to the published one.

All are expressed by `transformers`' `DeepseekV3Config` (multi-head latent attention, a mixture of experts with sigmoid
routing and a correction bias per expert). Source of the published numbers: config.json of deepseek-ai/DeepSeek-V3.
DeepSeek-V2 routes by softmax without that bias, which this class cannot express, so V2 is no preset: load it by
`model.from_pretrained`, which picks V2's own class.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers.models.deepseek_v3 import DeepseekV3Config

from ciuic.errors import ModelError

Scalar = bool | int | float | str

_OWN_FIELDS = frozenset({"summary", "yarn_factor"})
"""Fields of a Preset that `DeepseekV3Config` does not have."""

_NOT_FOR_OVERRIDES = frozenset(
    {"vocab_size", "rope_parameters", "use_cache", "output_router_logits", "pretraining_tp", "num_mtp_layers"}
)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The part of a configuration in which the presets differ; field names are those of `DeepseekV3Config`."""

    summary: str
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int = 1
    n_group: int = 1
    topk_group: int = 1
    first_k_dense_replace: int = 1
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    routed_scaling_factor: float = 2.5
    max_position_embeddings: int = 4096
    yarn_factor: float = 1.0
    """More than 1 stretches the positions from 4096 by YaRN (arXiv 2309.00071)."""


PRESETS: Mapping[str, Preset] = {
    "deepseek-v3-tiny": Preset(
        summary="0.73 M parameters by byte; about 60 ms per step of 8 x 128 tokens on one processor core",
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        n_routed_experts=8,
        num_experts_per_tok=2,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=32,
    ),
    "deepseek-v3-mini": Preset(
        summary="10 M parameters by byte: a laptop",
        hidden_size=256,
        intermediate_size=704,
        moe_intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=8,
        n_routed_experts=16,
        num_experts_per_tok=4,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=32,
    ),
    "deepseek-v3-small": Preset(
        summary="156 M parameters by byte, 35 M of them active per token: one small GPU",
        hidden_size=512,
        intermediate_size=1408,
        moe_intermediate_size=256,
        num_hidden_layers=12,
        num_attention_heads=8,
        n_routed_experts=32,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        q_lora_rank=192,
        kv_lora_rank=128,
        qk_rope_head_dim=32,
        qk_nope_head_dim=64,
        v_head_dim=64,
    ),
    "deepseek-v3-medium": Preset(
        summary="1.6 B parameters by byte: one large GPU",
        hidden_size=1024,
        intermediate_size=2816,
        moe_intermediate_size=512,
        num_hidden_layers=16,
        num_attention_heads=16,
        n_routed_experts=64,
        num_experts_per_tok=6,
        n_shared_experts=2,
        n_group=8,
        topk_group=4,
        q_lora_rank=384,
        kv_lora_rank=256,
        qk_rope_head_dim=32,
        qk_nope_head_dim=64,
        v_head_dim=64,
    ),
    "deepseek-v3-16b": Preset(
        summary="the shape of DeepSeek-V2-Lite with V3's router: a node of several GPUs",
        hidden_size=2048,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        num_hidden_layers=27,
        num_attention_heads=16,
        n_routed_experts=64,
        num_experts_per_tok=6,
        n_shared_experts=2,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        routed_scaling_factor=1.0,
    ),
    "deepseek-v3": Preset(
        summary="the published configuration, 671,026,404,352 parameters with its own tokenizer",
        hidden_size=7168,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        num_hidden_layers=61,
        num_attention_heads=128,
        n_routed_experts=256,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
        first_k_dense_replace=3,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        max_position_embeddings=163840,
        yarn_factor=40.0,
    ),
}


def unknown_preset(name: str) -> ModelError:
    """The error for a preset that does not exist: it lists the ones that do and suggests the nearest."""
    near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ModelError(
        f"there is no DeepSeek model named {name!r} here",
        cause=f"the presets are {', '.join(PRESETS)}",
        next=f"{hint}set model.preset to one of them, or model.from_pretrained to a folder or a hub id "
        "such as deepseek-ai/DeepSeek-V2-Lite",
    )


def preset_config(name: str, vocab_size: int, overrides: Mapping[str, Scalar] | None = None) -> DeepseekV3Config:
    """The configuration of a preset with `vocab_size` entries of vocabulary and some fields replaced.

    Raises ModelError for an unknown preset, an unknown field or numbers that do not fit each other.
    """
    preset = PRESETS.get(name)
    if preset is None:
        raise unknown_preset(name)
    fields: dict[str, Any] = {key: value for key, value in vars(preset).items() if key not in _OWN_FIELDS}
    fields |= {"num_key_value_heads": preset.num_attention_heads, "rope_parameters": _rope(preset)}
    changed = dict(overrides or {})
    check_override_names(changed, [n for n in DeepseekV3Config.__annotations__ if n not in _NOT_FOR_OVERRIDES])
    if "num_attention_heads" in changed:
        changed.setdefault("num_key_value_heads", changed["num_attention_heads"])
    fields |= changed
    try:
        config = DeepseekV3Config(vocab_size=vocab_size, bos_token_id=None, eos_token_id=None, **fields)
    except (StrictDataclassError, TypeError, ValueError, KeyError) as error:
        raise ModelError(
            f"the configuration of {name} is not valid with these overrides",
            cause=" ".join(str(error).split()),
            next="correct model.overrides in the job file",
        ) from error
    _check_shape(name, config)
    return config


def _rope(preset: Preset) -> dict[str, object]:
    if preset.yarn_factor == 1.0:
        return {"rope_type": "default", "rope_theta": 10000.0}
    return {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": preset.yarn_factor,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }


def check_override_names(overrides: Mapping[str, Scalar], known: list[str]) -> None:
    """Raise ModelError naming the first override that is no field of the configuration, with the nearest that is."""
    for name in overrides:
        if name == "vocab_size":
            raise ModelError(
                "model.overrides cannot set vocab_size",
                cause="the size of the vocabulary follows the tokenizer",
                next="choose the tokenizer by data.tokenizer",
            )
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ModelError(
                f"model.overrides names {name!r}, which is no field of the model's configuration",
                next=f"did you mean {near[0]!r}?" if near else f"the fields are {', '.join(sorted(known))}",
            )


def _check_shape(name: str, config: DeepseekV3Config) -> None:
    """Refuse numbers that would fail deep inside the model, or not fail and train nonsense."""
    shape = SimpleNamespace(**config.to_dict())
    experts, groups = shape.n_routed_experts, shape.n_group
    positive = ("hidden_size", "num_hidden_layers", "num_attention_heads", "n_routed_experts", "num_experts_per_tok")
    problem = ""
    if any(getattr(shape, field) < 1 for field in (*positive, "n_group", "topk_group", "n_shared_experts")):
        problem = "sizes must be at least 1"
    elif experts % groups or experts // groups < 2:
        problem = f"{experts} experts do not make {groups} equal groups of at least 2 (n_routed_experts, n_group)"
    elif shape.topk_group > groups:
        problem = f"topk_group is {shape.topk_group} of {groups} groups"
    elif shape.num_experts_per_tok > shape.topk_group * (experts // groups):
        problem = f"a token cannot choose {shape.num_experts_per_tok} experts from {shape.topk_group} groups"
    elif shape.num_attention_heads != shape.num_key_value_heads:
        problem = "multi-head latent attention needs num_key_value_heads equal to num_attention_heads"
    if problem:
        raise ModelError(
            f"the configuration of {name} does not fit together", cause=problem, next="correct model.overrides"
        )


def parameter_count(config: DeepseekV3Config) -> int:
    """Number of parameters of `DeepseekV3ForCausalLM(config)`, by formula (no model is built; buffers not counted).

    Source: arXiv 2412.19437, section 2.1; a test compares it with models on the meta device.
    """
    shape = SimpleNamespace(**config.to_dict())  # the class types several sizes as optional
    hidden, layers = shape.hidden_size, shape.num_hidden_layers
    dense_layers = min(shape.first_k_dense_replace, layers)
    embeddings = shape.vocab_size * hidden * (1 if shape.tie_word_embeddings else 2)
    dense_mlp = 3 * hidden * shape.intermediate_size
    experts = shape.n_routed_experts + shape.n_shared_experts
    moe_mlp = 3 * hidden * shape.moe_intermediate_size * experts + shape.n_routed_experts * hidden
    norms = 2 * hidden * layers + hidden
    mlps = dense_layers * dense_mlp + (layers - dense_layers) * moe_mlp
    return embeddings + norms + mlps + layers * _attention_parameters(shape)


def _attention_parameters(shape: SimpleNamespace) -> int:
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    query_dim = heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim)
    query, biases = hidden * query_dim, shape.kv_lora_rank + shape.qk_rope_head_dim + hidden
    if shape.q_lora_rank is not None:
        query = shape.q_lora_rank * (hidden + 1 + query_dim)  # down, its norm, up
        biases += shape.q_lora_rank
    latent = hidden * (shape.kv_lora_rank + shape.qk_rope_head_dim) + shape.kv_lora_rank
    key_value = shape.kv_lora_rank * heads * (shape.qk_nope_head_dim + shape.v_head_dim)
    output = heads * shape.v_head_dim * hidden
    return query + latent + key_value + output + (biases if shape.attention_bias else 0)
