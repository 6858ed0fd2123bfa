"""Choosing implementations by name."""

from typing import Any

import pytest
import torch

from drawloom.components.kernels.auto import AutoKernels
from drawloom.components.ports.data import IGNORED
from drawloom.components.ports.model import Kernels
from drawloom.graph.fit import misfits
from drawloom.graph.spec import read_spec
from drawloom.kernels.attention import attention_eager
from drawloom.kernels.embedding import embedding_eager
from drawloom.kernels.linear import linear_eager
from drawloom.kernels.linear_cross_entropy import linear_cross_entropy_eager
from drawloom.kernels.rms_norm import rms_norm_eager
from drawloom.kernels.rope import rope_eager
from drawloom.kernels.swiglu import swiglu_eager

OPERATIONS = ["linear", "embedding", "rms_norm", "swiglu", "rope", "attention", "linear_cross_entropy"]


def test_fits_its_port() -> None:
    """The component keeps the promises of Kernels."""
    assert misfits(AutoKernels, Kernels) == []


def test_each_operation_is_a_setting() -> None:
    """A recipe names an implementation by the operation's own name, and leaves it to us by default."""
    fields = read_spec("kernels.auto", AutoKernels).fields
    assert {name: field.default for name, field in fields.items()} == dict.fromkeys(OPERATIONS, "auto")


@pytest.mark.parametrize("choice", ["auto", "eager"])
def test_operations_are_the_eager_ones(choice: Any) -> None:
    """On a CPU each operation is its eager implementation, whichever way it is chosen."""
    kernels = AutoKernels(**dict.fromkeys(OPERATIONS, choice))
    x, weight = torch.randn(2, 3, 4, 8), torch.randn(8)
    cos, sin = torch.rand(2, 2, 3, 4)
    documents, targets = torch.zeros(2, 3, dtype=torch.int64), torch.tensor([1, 0, IGNORED])
    assert torch.equal(kernels.linear(x, x[0, 0]), linear_eager(x, x[0, 0]))
    assert torch.equal(kernels.embedding(targets[:2], x[0, 0]), embedding_eager(targets[:2], x[0, 0]))
    assert torch.equal(kernels.rms_norm(x, weight, 0.1), rms_norm_eager(x, weight, 0.1))
    assert torch.equal(kernels.swiglu(x, -x), swiglu_eager(x, -x))
    assert torch.equal(kernels.rope(x, cos, sin), rope_eager(x, cos, sin))
    assert torch.equal(kernels.attention(x, x, x, documents), attention_eager(x, x, x, documents))
    losses = kernels.linear_cross_entropy(x[0, :, 0], x[0, 0], targets)
    assert torch.equal(losses, linear_cross_entropy_eager(x[0, :, 0], x[0, 0], targets))
    assert losses[2] == 0
