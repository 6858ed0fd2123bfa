"""In which dtype each kind of number is kept. There is no autocast: what a recipe says here is what happens."""

from collections.abc import Iterator
from typing import Literal

import torch

from drawloom.graph import Problem, component, setting
from drawloom.graph.wiring.node import NodeView

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


def _no_float16(name: str | None) -> str | None:
    # Its range is so small that gradients underflow; a loss scaler, which would help, does not exist here.
    return "gradients underflow in float16; write 'bfloat16'" if name == "float16" else None


@component
class DtypePolicy:
    """
    One dtype for each kind of number.

    `parameter` is what the optimizer keeps (masters), `compute` what layers multiply in (`param_dtype` of FSDP's
    MixedPrecisionPolicy): each trained weight is cast once a step. `gradient` is what microbatches are summed in.
    """

    _parameter: Name = setting(
        default="float32", alias="parameter", check=_no_float16, doc="dtype of parameters, as the optimizer keeps them"
    )
    _compute: Name | None = setting(
        default=None,
        alias="compute",
        check=_no_float16,
        doc="dtype of activations and of the weights that layers multiply with; that of parameters if left out",
    )
    _gradient: Name | None = setting(
        default=None,
        alias="gradient",
        check=_no_float16,
        doc="dtype in which gradients of microbatches are summed; that of parameters if left out",
    )
    _reduce: Name = setting(default="float32", alias="reduce", check=_wide, doc="least dtype of sums over ranks")
    uncast: tuple[str, ...] = setting(
        default=(), doc='names of parameters that layers use in the parameter dtype, as patterns: "*norm.weight"'
    )

    def __attrs_post_init__(self) -> None:
        """Refuse, with a ValueError, what `check` refuses in a recipe."""
        for _, text, hint in misfits(self._parameter, self._compute, self._gradient, self.uncast):
            raise ValueError(f"{text}; {hint}")

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Dtypes that go together."""
        values = node.settings
        for key, text, hint in misfits(values["parameter"], values["compute"], values["gradient"], values["uncast"]):
            yield node.problem(key, text, hint)

    @property
    def parameter(self) -> torch.dtype:
        """Of parameters, as the optimizer keeps them."""
        return DTYPES[self._parameter]

    @property
    def compute(self) -> torch.dtype:
        """Of activations, and of the weights that layers multiply with."""
        return DTYPES[self._compute or self._parameter]

    @property
    def gradient(self) -> torch.dtype:
        """Of gradients, summed over microbatches."""
        return DTYPES[self._gradient or self._parameter]

    @property
    def reduce(self) -> torch.dtype:
        """Of sums over ranks, at least."""
        return DTYPES[self._reduce]


def misfits(
    parameter: str, compute: str | None, gradient: str | None, uncast: tuple[str, ...]
) -> Iterator[tuple[str, str, str]]:
    """Which settings can't be together: the key, what is wrong, and what to write instead."""
    used = compute or parameter
    if DTYPES[used].itemsize > DTYPES[parameter].itemsize:
        text = f"compute = {used!r} is wider than parameter = {parameter!r}: the cast would add nothing"
        yield "compute", text, f"write parameter = {used!r}, or compute = {parameter!r}"
    if gradient and DTYPES[gradient].itemsize < DTYPES[used].itemsize:
        text = f"gradient = {gradient!r} is narrower than compute = {used!r}: sums of microbatches would lose bits"
        yield "gradient", text, f"write gradient = {used!r} or leave it out"
    if uncast and used == parameter:
        text = f"nothing is cast, since compute and parameter are both {parameter!r}"
        yield "uncast", text, "remove uncast"
