"""Dtypes for parameters, activations, gradients and reductions."""

import re
from typing import Any

import pytest
import torch

from drawloom.components.distributed.precision import DtypePolicy
from drawloom.graph.registry.registry import read_spec


def test_names_become_dtypes() -> None:
    """A purpose has its own dtype; compute and gradient default to the parameter dtype."""
    precision = DtypePolicy(parameter="float32", compute="bfloat16", gradient="float64")
    given = (precision.parameter, precision.compute, precision.gradient, precision.reduce)
    assert given == (torch.float32, torch.bfloat16, torch.float64, torch.float32)
    assert DtypePolicy().compute is torch.float32
    half = DtypePolicy(parameter="bfloat16")
    assert (half.compute, half.gradient, half.reduce) == (torch.bfloat16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"parameter": "float16"}, "gradients underflow in float16; write 'bfloat16'"),
        ({"compute": "float16"}, "gradients underflow in float16"),
        ({"parameter": "bfloat16", "compute": "float32"}, "compute = 'float32' is wider than parameter = 'bfloat16'"),
        ({"compute": "float32", "gradient": "bfloat16"}, "gradient = 'bfloat16' is narrower than compute = 'float32'"),
        ({"uncast": ("*norm*",)}, "nothing is cast, since compute and parameter are both 'float32'"),
    ],
)
def test_dtypes_that_cannot_work_together_are_refused(values: dict[str, Any], message: str) -> None:
    """Settings that would train wrongly or do nothing are refused, with the values in the message."""
    with pytest.raises(ValueError, match=re.escape(message)):
        DtypePolicy(**values)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_narrow_sums_over_ranks_are_refused(name: str) -> None:
    """Reductions narrower than float32 are an invalid setting."""
    with pytest.raises(ValueError, match="lose small gradients; write 'float32' or 'float64'"):
        DtypePolicy(reduce=name)  # type: ignore[arg-type]
    assert DtypePolicy(reduce="float64").reduce is torch.float64


def test_settings_have_the_names_of_the_port() -> None:
    """The keys in a recipe are the names of the port's properties, without underscores."""
    assert list(read_spec("distributed.precision", DtypePolicy).fields) == [
        "parameter",
        "compute",
        "gradient",
        "reduce",
        "uncast",
    ]
