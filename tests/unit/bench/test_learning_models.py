"""The models of `ciuic bench learning`: all nodes in one pass are the same as each node by itself."""

import pytest
import torch
from torch import nn

from ciuic.bench import learning_gpt, learning_moe
from ciuic.bench.learning_data import batch_starts, held_out_windows, load_text, windows
from ciuic.bench.learning_optim import Inner, cosine
from ciuic.bench.learning_stack import Stack

FAMILIES = {"gpt": learning_gpt, "mixture": learning_moe}


def tokens_of(nodes: int, batch: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, (nodes, batch, 17), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_of_a_node_is_that_of_its_own_copy(family: str) -> None:
    model = FAMILIES[family]
    tokens = tokens_of(3, 2)
    together = Stack(model.build(0), model.loss, 3)
    together.theta[1] *= 1.01  # no two nodes have the same weights
    together.theta[2] *= 0.98
    together.backward(tokens)
    for node in range(3):
        alone = Stack(model.build(0), model.loss, 1)
        alone.theta[0] = together.theta[node]
        alone.backward(tokens[node : node + 1])
        torch.testing.assert_close(together.gradient[node], alone.gradient[0], rtol=1e-3, atol=1e-6)


def test_the_mixture_is_transformers_deepseek() -> None:
    model = learning_moe.build(3).train()
    with torch.no_grad():  # so that the experts are used unevenly
        for name, parameter in model.named_parameters():
            parameter.mul_(8.0 if name.endswith("gate.weight") else 1.0)
    stack = Stack(model, learning_moe.loss, 1)
    tokens = tokens_of(1, 4)
    stack.backward(tokens)
    logits = model(input_ids=tokens[0, :, :-1], use_cache=False).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[0, :, 1:].flatten())
    loss.backward()
    torch.testing.assert_close(
        torch.tensor(stack.evaluate(stack.initial, tokens[0])), loss.detach(), rtol=1e-5, atol=1e-6
    )
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(stack.weight_gradient(name)[0], parameter.grad, rtol=1e-3, atol=2e-6, msg=name)


def test_muon_is_torchs_up_to_its_bfloat16() -> None:
    stack = Stack(learning_gpt.build(0), learning_gpt.loss, 2)
    inner = Inner(stack, 1e-3, muon_multiplier=4.0, matrices=learning_gpt.MATRICES)
    model = learning_gpt.build(0)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    own = {name: p for name, p in model.named_parameters() if name.endswith(("out.weight", "up.weight", "down.weight"))}
    reference = torch.optim.Muon(
        own.values(), lr=4e-3, weight_decay=0.1 / 4, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(3):
        stack.gradient.normal_(generator=torch.Generator().manual_seed(step))
        for name, parameter in own.items():
            parameter.grad = stack.weight_gradient(name)[1].clone()
        reference.step()
        inner.step(1.0)
    for name, parameter in own.items():
        moved = (parameter - start[name]).norm()
        assert float((parameter - stack.weight(name)[1]).norm().detach() / moved.detach()) < 0.02, name


def test_muon_trains_queries_keys_and_values_as_three_matrices_and_leaves_embeddings_to_adamw() -> None:
    stack = Stack(learning_gpt.build(0), learning_gpt.loss, 1)
    inner = Inner(stack, 1e-3, muon_multiplier=4.0, matrices=learning_gpt.MATRICES)
    before = {name: stack.weight(name).clone() for name in ("blocks.0.attention.qkv.weight", "embedding.weight")}
    stack.gradient.normal_(generator=torch.Generator().manual_seed(0))
    inner.step(1.0)
    moved = {name: stack.weight(name) - old for name, old in before.items()}
    for part in moved["blocks.0.attention.qkv.weight"].chunk(3, dim=1):  # each of norm about lr 0.2 sqrt(96 * 96)
        assert 0.7 < float(part.norm()) / (4e-3 * 0.2 * 96) < 1.3
    torch.testing.assert_close(moved["embedding.weight"].abs().mean(), torch.tensor(1e-3), rtol=0.05, atol=0)


def test_the_rate_warms_up_and_falls_to_a_tenth() -> None:
    factors = [cosine(step, 100, 40) for step in range(100)]
    assert factors[0] == 1 / 40
    assert max(factors) == factors[39] == 1.0
    assert 0.1 <= factors[-1] < 0.11


def test_nodes_draw_from_parts_of_the_text_that_do_not_overlap() -> None:
    starts = batch_starts(0, (50, 4, 4), 64)
    share = (len(load_text().train) - 65) // 4
    for node in range(4):
        assert bool(((starts[:, node] >= node * share) & (starts[:, node] < (node + 1) * share)).all())
    assert windows(load_text().train, starts, 64).shape == (50, 4, 4, 65)
    assert torch.equal(held_out_windows(8, 64), held_out_windows(8, 64))
