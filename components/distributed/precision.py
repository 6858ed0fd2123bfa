"""In what dtype each kind of number is kept. There is no autocast: what stands here is what happens."""

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
    """One dtype for each kind of number."""

    _parameter: Name = setting(default="float32", alias="parameter", doc="dtype of parameters")
    _compute: Name = setting(default="float32", alias="compute", doc="dtype of activations")
    _gradient: Name = setting(default="float32", alias="gradient", doc="dtype of accumulated gradients")
    _reduce: Name = setting(default="float32", alias="reduce", check=_wide, doc="least dtype of sums over ranks")

    @property
    def parameter(self) -> torch.dtype:
        """Of parameters."""
        return DTYPES[self._parameter]

    @property
    def compute(self) -> torch.dtype:
        """Of activations."""
        return DTYPES[self._compute]

    @property
    def gradient(self) -> torch.dtype:
        """Of accumulated gradients."""
        return DTYPES[self._gradient]

    @property
    def reduce(self) -> torch.dtype:
        """Of sums over ranks."""
        return DTYPES[self._reduce]
