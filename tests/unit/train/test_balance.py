import logging
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers.models.deepseek_v3 import DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from ciuic.train.balance import ExpertBalancer
from ciuic.train.deepseek import preset_config

torch.set_num_threads(1)


@pytest.fixture
def model() -> DeepseekV3ForCausalLM:
    torch.manual_seed(0)
    return DeepseekV3ForCausalLM(preset_config("deepseek-v3-tiny", 64)).train()


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))


def biases(model: nn.Module) -> list[torch.Tensor]:
    return [m.e_score_correction_bias for m in model.modules() if isinstance(m, DeepseekV3TopkRouter)]


def test_every_routed_token_is_counted_once(model: DeepseekV3ForCausalLM, tokens: torch.Tensor) -> None:
    balancer = ExpertBalancer(model, rate=0.001)
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert balancer.routers == 2
    assert [int(load.sum()) for load in balancer.loads()] == [2 * 16 * 2] * 2  # batch x seq x experts per token


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_of_checkpointed_layers_is_not_counted_again(
    model: DeepseekV3ForCausalLM, tokens: torch.Tensor, use_reentrant: bool
) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    ran = []
    gate = model.model.layers[1].mlp.gate
    gate.register_forward_hook(lambda *_: ran.append(1))
    balancer = ExpertBalancer(model, rate=0.001)
    embeddings = model.get_input_embeddings()(tokens)
    model(inputs_embeds=embeddings, labels=tokens, use_cache=False).loss.backward()
    assert len(ran) == 2  # the layer did run again
    assert [int(load.sum()) for load in balancer.loads()] == [2 * 16 * 2] * 2


def test_evaluation_is_not_counted(model: DeepseekV3ForCausalLM, tokens: torch.Tensor) -> None:
    balancer = ExpertBalancer(model, rate=0.001)
    model.eval()(input_ids=tokens)
    assert balancer.loads() == []
    balancer.step()
    assert all(bias.count_nonzero() == 0 for bias in biases(model))


def test_busy_experts_lose_bias_and_idle_ones_gain_it(model: DeepseekV3ForCausalLM, tokens: torch.Tensor) -> None:
    balancer = ExpertBalancer(model, rate=0.5)
    model(input_ids=tokens)
    load = balancer.loads()[0].float()
    balancer.step()
    assert torch.equal(biases(model)[0], 0.5 * torch.sign(load.mean() - load))
    assert balancer.loads() == []


def test_forward_that_fails_does_not_leave_counting_on(model: DeepseekV3ForCausalLM, tokens: torch.Tensor) -> None:
    balancer = ExpertBalancer(model, rate=0.001)
    with pytest.raises(IndexError):
        model(input_ids=tokens + 1000)
    model.model.layers[1].mlp.gate(torch.zeros(3, 128))
    assert balancer.loads() == []


def test_closed_balancer_counts_nothing(model: DeepseekV3ForCausalLM, tokens: torch.Tensor) -> None:
    balancer = ExpertBalancer(model, rate=0.001)
    balancer.close()
    model(input_ids=tokens)
    assert balancer.loads() == []


def test_model_without_experts_has_no_routers() -> None:
    balancer = ExpertBalancer(nn.Linear(2, 2), rate=0.001)
    balancer.step()
    assert balancer.routers == 0


def test_skewed_router_becomes_balanced() -> None:
    """Without the bias one expert of eight takes a token of every two; with it no expert is far from the mean."""
    config = preset_config("deepseek-v3-tiny", 64)
    router = DeepseekV3TopkRouter(config).train()
    generator = torch.Generator().manual_seed(2)
    nn.init.normal_(router.weight, std=0.02, generator=generator)
    with torch.no_grad():
        router.weight[0] += 0.05
    states = torch.randn(512, 128, generator=generator) + 0.5
    balancer = ExpertBalancer(router, rate=0.01)
    router(states)
    before = balancer.loads()[0]
    for _ in range(200):
        router(states)
        balancer.step()
    router(states)
    after = balancer.loads()[0]
    mean = 512 * 2 / 8
    assert before.max() == 512  # every token
    assert after.max() < 1.3 * mean
    assert after.min() > 0.7 * mean


def test_router_that_does_not_tell_its_choice_is_left_alone_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Silent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("e_score_correction_bias", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 1.0

    model = Silent().train()
    balancer = ExpertBalancer(model, rate=0.1)
    with caplog.at_level(logging.WARNING, logger="ciuic.train"):
        model(torch.zeros(1))
        model(torch.zeros(1))
    balancer.step()
    assert len(caplog.records) == 1
    assert model.e_score_correction_bias.count_nonzero() == 0


def test_ranks_of_a_node_add_their_counts_before_they_move_the_bias(
    model: DeepseekV3ForCausalLM, tokens: torch.Tensor, tmp_path: object
) -> None:
    """One real gloo process group; the other rank is played by doubling what all_reduce returns."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        balancer = ExpertBalancer(model, rate=0.5)
        model(input_ids=tokens)
        load = balancer.loads()[0].float()
        seen = []
        with (
            mock.patch.object(dist, "get_world_size", return_value=2),
            mock.patch.object(dist, "all_reduce", side_effect=lambda flat: seen.append(flat.clone()) or flat.mul_(2)),
        ):
            balancer.step()
    finally:
        dist.destroy_process_group()
    assert [flat.numel() for flat in seen] == [16]  # both routers in one exchange
    assert torch.equal(biases(model)[0], 0.5 * torch.sign(load.mean() - load))
