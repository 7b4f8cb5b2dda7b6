"""A tiny DeepSeek-V3 (latent attention, 16 experts of which a token uses 2), all nodes in one pass.

Names, shapes and initial weights are those of `transformers`' DeepseekV3ForCausalLM; a test compares loss and gradients
with it. Each expert computes only the tokens that chose it; none is dropped.
"""

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v3 import DeepseekV3Config, DeepseekV3ForCausalLM

from ciuic.bench.learning_stack import Weights, embed, linear, next_token_loss
from ciuic.train.initial import initial_weights

WIDTH, LAYERS, HEADS, EXPERTS, CHOSEN = 96, 3, 4, 16, 2
QUERY_RANK, KEY_RANK, PLAIN, ROTARY, VALUE = 32, 32, 16, 8, 24
"""Ranks of the latent attention; per head: dimensions without and with rotary positions, and of the values."""
MATRICES = {
    "q_a_proj.weight": 1, "q_b_proj.weight": 1, "kv_a_proj_with_mqa.weight": 1, "kv_b_proj.weight": 1,
    "o_proj.weight": 1, "gate_proj.weight": 1, "up_proj.weight": 1, "down_proj.weight": 1,
    "experts.gate_up_proj": 2, "experts.down_proj": 1,
}  # fmt: skip
"""Ends of the names that Muon trains, and into how many matrices each (of each expert) is cut by rows."""
ROUTED_SCALE, EPS, THETA = 2.5, 1e-6, 10000.0


def config() -> DeepseekV3Config:
    """The model as transformers describes it."""
    return DeepseekV3Config(
        vocab_size=256, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, intermediate_size=192, moe_intermediate_size=48, n_routed_experts=EXPERTS,
        num_experts_per_tok=CHOSEN, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1,
        q_lora_rank=QUERY_RANK, kv_lora_rank=KEY_RANK, qk_nope_head_dim=PLAIN, qk_rope_head_dim=ROTARY,
        v_head_dim=VALUE, routed_scaling_factor=ROUTED_SCALE, norm_topk_prob=True, rms_norm_eps=EPS,
        max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
    )  # fmt: skip


def build(seed: int) -> DeepseekV3ForCausalLM:
    """Weights that follow the seed, the same on every machine."""
    with initial_weights(seed):
        return DeepseekV3ForCausalLM(config())


def loss(weights: Weights, tokens: Tensor) -> Tensor:
    """Mean loss of each node [nodes] on tokens [nodes, batch, length + 1]."""
    nodes, batch, length = tokens.shape[0], tokens.shape[1], tokens.shape[2] - 1
    table = weights["model.embed_tokens.weight"]
    x = embed(tokens[:, :, :-1].reshape(nodes, -1), table)
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        x = x + _attention(
            weights, f"{layer}.self_attn", _norm(weights, f"{layer}.input_layernorm", x), (batch, length)
        )
        inner = _norm(weights, f"{layer}.post_attention_layernorm", x)
        x = x + (_mixture(weights, f"{layer}.mlp", inner) if number else _mlp(weights, f"{layer}.mlp", inner))
    logits = linear(_norm(weights, "model.norm", x), table)
    return next_token_loss(logits, tokens[:, :, 1:].reshape(nodes, -1))


def _norm(weights: Weights, name: str, x: Tensor) -> Tensor:
    return nn.functional.rms_norm(x, x.shape[-1:], eps=EPS) * weights[f"{name}.weight"][:, None]


def _mlp(weights: Weights, name: str, x: Tensor) -> Tensor:
    gate = linear(x, weights[f"{name}.gate_proj.weight"])
    up = linear(x, weights[f"{name}.up_proj.weight"])
    return linear(nn.functional.silu(gate) * up, weights[f"{name}.down_proj.weight"])


def _attention(weights: Weights, name: str, x: Tensor, shape: tuple[int, int]) -> Tensor:
    """Multi-head latent attention of x [nodes, batch x length, width]; `shape` = (batch, length)."""
    nodes, (batch, length) = len(x), shape
    cut = (nodes * batch, length, HEADS)
    query = _norm(weights, f"{name}.q_a_layernorm", linear(x, weights[f"{name}.q_a_proj.weight"]))
    query = linear(query, weights[f"{name}.q_b_proj.weight"]).view(*cut, PLAIN + ROTARY).transpose(1, 2)
    latent, rotary = linear(x, weights[f"{name}.kv_a_proj_with_mqa.weight"]).split((KEY_RANK, ROTARY), dim=-1)
    latent = _norm(weights, f"{name}.kv_a_layernorm", latent)
    both = linear(latent, weights[f"{name}.kv_b_proj.weight"]).view(*cut, PLAIN + VALUE).transpose(1, 2)
    key, value = both.split((PLAIN, VALUE), dim=-1)
    rotary = _rotate(rotary.reshape(nodes * batch, 1, length, ROTARY)).expand(-1, HEADS, -1, -1)
    query = torch.cat([query[..., :PLAIN], _rotate(query[..., PLAIN:])], dim=-1)
    mixed = nn.functional.scaled_dot_product_attention(query, torch.cat([key, rotary], dim=-1), value, is_causal=True)
    return linear(mixed.transpose(1, 2).reshape(nodes, batch * length, -1), weights[f"{name}.o_proj.weight"])


def _rotate(x: Tensor) -> Tensor:
    """Rotary positions on interleaved pairs of x [..., length, ROTARY]."""
    frequencies = 1.0 / THETA ** (torch.arange(0, ROTARY, 2) / ROTARY)
    angles = torch.arange(x.shape[-2])[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], dim=-1)


def _mixture(weights: Weights, name: str, x: Tensor) -> Tensor:
    """Shared expert plus the chosen experts, weighted by the router."""
    nodes, count, width = x.shape
    scores = linear(x, weights[f"{name}.gate.weight"]).sigmoid()
    choice = (scores + weights[f"{name}.gate.e_score_correction_bias"][:, None]).topk(CHOSEN, dim=-1).indices
    shares = scores.gather(-1, choice)
    shares = shares / (shares.sum(dim=-1, keepdim=True) + 1e-20) * ROUTED_SCALE
    expert = (choice + torch.arange(nodes)[:, None, None] * EXPERTS).flatten()
    slot, token, order, capacity = _places(expert, nodes * EXPERTS)
    flat = x.reshape(nodes * count, width)
    filled = x.new_zeros(nodes * EXPERTS * capacity, width).index_copy(0, slot, flat[token])
    gate_up = weights[f"{name}.experts.gate_up_proj"].flatten(0, 1)
    gate, up = linear(filled.view(-1, capacity, width), gate_up).chunk(2, dim=-1)
    done = linear(nn.functional.silu(gate) * up, weights[f"{name}.experts.down_proj"].flatten(0, 1))
    back = done.reshape(-1, width)[slot] * shares.flatten()[order][:, None]
    routed = torch.zeros_like(flat).index_add(0, token, back)
    return routed.view(x.shape) + _mlp(weights, f"{name}.shared_experts", x)


def _places(expert: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """Where each assignment [n] goes: (slot, token, order of assignments, slots per expert)."""
    order = expert.argsort(stable=True)
    counts = expert.bincount(minlength=experts)
    capacity = int(counts.max())
    within = torch.arange(len(expert)) - (counts.cumsum(0) - counts)[expert[order]]
    return expert[order] * capacity + within, order // CHOSEN, order, capacity
