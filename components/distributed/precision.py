"""The dtype of parameters, activations, gradients and reductions. There is no autocast: these are the dtypes used."""

from typing import Literal

import torch

from drawloom.graph import component, setting

Name = Literal["float16", "bfloat16", "float32", "float64"]

DTYPES: dict[str, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def _wide(name: str) -> str | None:
    if name in ("float32", "float64"):
        return None
    return f"sums over ranks in {name} lose small gradients; write 'float32' or 'float64'"


@component
class DtypePolicy:
    """One dtype each for parameters, compute, gradients and reductions."""

    _parameter: Name = setting(default="float32", alias="parameter", doc="dtype of parameters")
    _compute: Name = setting(default="float32", alias="compute", doc="dtype of activations; FSDP's param_dtype")
    _gradient: Name = setting(default="float32", alias="gradient", doc="dtype of accumulated gradients")
    _reduce: Name = setting(default="float32", alias="reduce", check=_wide, doc="narrowest dtype of sums over ranks")

    @property
    def parameter(self) -> torch.dtype:
        """Dtype of parameters."""
        return DTYPES[self._parameter]

    @property
    def compute(self) -> torch.dtype:
        """Dtype of activations."""
        return DTYPES[self._compute]

    @property
    def gradient(self) -> torch.dtype:
        """Dtype of accumulated gradients."""
        return DTYPES[self._gradient]

    @property
    def reduce(self) -> torch.dtype:
        """Narrowest dtype of sums over ranks."""
        return DTYPES[self._reduce]
