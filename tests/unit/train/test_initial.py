import hashlib
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from ciuic.train.initial import initial_weights

DIGEST_PROGRAM = """
import hashlib, torch
from torch import nn
from ciuic.train.initial import initial_weights
with initial_weights(5):
    weight = nn.init.normal_(nn.Linear(300, 400).weight, std=0.02)
print(torch.backends.cpu.get_cpu_capability(), hashlib.sha256(weight.detach().numpy().tobytes()).hexdigest())
"""


def drawn(seed: int) -> torch.Tensor:
    with initial_weights(seed):
        return nn.init.normal_(torch.empty(300, 400), mean=1.0, std=0.02)


def test_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))


def test_weights_have_the_asked_mean_and_deviation() -> None:
    weights = drawn(3)
    assert weights.mean().item() == pytest.approx(1.0, abs=3e-4)
    assert weights.std().item() == pytest.approx(0.02, rel=0.02)


def test_global_random_state_is_untouched() -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    drawn(4)
    assert torch.equal(torch.rand(3), expected)


def test_tensors_of_any_layout_and_type_are_filled() -> None:
    with initial_weights(6):
        transposed = torch.empty(4, 3).t()
        nn.init.normal_(transposed)
        low = torch.empty(5, dtype=torch.bfloat16).normal_()
        empty = torch.empty(0).normal_()
    assert transposed.is_contiguous() is False
    assert transposed.abs().sum() > 0
    assert torch.isfinite(low).all()
    assert empty.numel() == 0


def test_weights_do_not_depend_on_the_processors_instructions() -> None:
    """torch's own normal numbers without vector instructions differ from those with them."""
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", DIGEST_PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    with initial_weights(5):
        here = nn.init.normal_(nn.Linear(300, 400).weight, std=0.02)
    assert done.stdout.split() == ["DEFAULT", hashlib.sha256(here.detach().numpy().tobytes()).hexdigest()]
