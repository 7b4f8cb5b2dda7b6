import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers.models.deepseek_v3 import DeepseekV3ForCausalLM

from ciuic.errors import DataError
from ciuic.train.deepseek import preset_config
from ciuic.train.evaluate import held_out_loss

torch.set_num_threads(1)
CPU = torch.device("cpu")


class Fixed(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, input_ids: torch.Tensor, labels: torch.Tensor) -> None:
        self._input_ids, self._labels = input_ids, labels

    def __len__(self) -> int:
        return len(self._input_ids)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._input_ids[number], "labels": self._labels[number]}


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return DeepseekV3ForCausalLM(preset_config("deepseek-v3-tiny", 64)).train()


@pytest.fixture
def held_out() -> Fixed:
    tokens = torch.randint(0, 64, (7, 13), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[2, 4:] = -100
    labels[6, 1:] = -100  # predicts nothing
    return Fixed(tokens, labels)


def per_token_mean(model: nn.Module, held_out: Fixed) -> float:
    with torch.no_grad():
        logits = model.eval()(input_ids=held_out._input_ids).logits.double()
    losses = nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), held_out._labels[:, 1:].flatten(), ignore_index=-100, reduction="none"
    )
    return float(losses.sum() / (held_out._labels[:, 1:] != -100).sum())


@pytest.mark.parametrize("batch_size", [1, 3, 7])
def test_loss_is_the_mean_over_tokens_however_they_are_batched(
    model: nn.Module, held_out: Fixed, batch_size: int
) -> None:
    loss, samples = held_out_loss(model, held_out, batch_size, CPU)
    assert samples == 7
    assert loss == pytest.approx(per_token_mean(model, held_out), rel=1e-5)


def test_same_parameters_give_the_same_number_bit_by_bit(model: nn.Module, held_out: Fixed) -> None:
    assert held_out_loss(model, held_out, 2, CPU) == held_out_loss(model, held_out, 2, CPU)


def test_modes_of_all_modules_are_restored(model: nn.Module, held_out: Fixed) -> None:
    model.lm_head.eval()
    seen = []
    model.register_forward_hook(lambda module, *_: seen.append(module.training))
    held_out_loss(model, held_out, 7, CPU)
    assert seen == [False]
    assert model.training
    assert not model.lm_head.training


def test_no_gradient_is_recorded(model: nn.Module, held_out: Fixed) -> None:
    held_out_loss(model, held_out, 7, CPU)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_nothing_to_predict_is_an_error(model: nn.Module) -> None:
    empty = Fixed(torch.zeros(2, 4, dtype=torch.int64), torch.full((2, 4), -100))
    with pytest.raises(DataError, match="nothing to predict"):
        held_out_loss(model, empty, 2, CPU)
