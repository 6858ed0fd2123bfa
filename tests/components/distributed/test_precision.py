"""Dtypes of parameters, activations, gradients and reductions."""

import pytest
import torch

from drawloom.components.distributed.precision import DtypePolicy
from drawloom.graph.registry.spec import read_spec


def test_names_become_dtypes() -> None:
    """Each setting becomes a torch dtype; the default is float32."""
    precision = DtypePolicy(parameter="bfloat16", compute="float16", gradient="float64")
    given = (precision.parameter, precision.compute, precision.gradient, precision.reduce)
    assert given == (torch.bfloat16, torch.float16, torch.float64, torch.float32)
    assert DtypePolicy().compute is torch.float32


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
    ]
