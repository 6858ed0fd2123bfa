"""Dtypes for parameters, activations, gradients and reductions. There is no autocast: only the recipe sets dtypes."""

from collections.abc import Iterator
from typing import Literal

import torch

from drawloom import NodeView, Problem, component, setting

Name = Literal["float16", "bfloat16", "float32", "float64"]

DTYPES: dict[str, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def _describe_reduce_dtype_fault(name: str) -> str | None:
    """Return a fault for a dtype too narrow for sums over ranks, else None."""
    if name in ("float32", "float64"):
        return None
    return f"sums over ranks in {name} lose small gradients; write 'float32' or 'float64'"


def _describe_float16_fault(name: str | None) -> str | None:
    """Return a fault for float16, else None."""
    # In its small range gradients underflow, and there is no loss scaler.
    return "gradients underflow in float16; write 'bfloat16'" if name == "float16" else None


@component(
    replaced_keys=dict.fromkeys(
        ("frozen", "frozen_in_compute"),
        'a table [quantized] with use = "frozen_weights.quantized", and its settings format and exclude',
    )
    | dict.fromkeys(
        ("linear", "linear_in_compute", "linear_weights", "gather"),
        'a table [float8] with use = "float8.training", and its settings exclude, round_weights and gather',
    )
)
class DtypePolicy:
    """
    A run's dtypes by kind of number (mixed precision).

    `parameter` is the optimizer's dtype (master weights). `compute` is the layers' dtype (`param_dtype` of FSDP's
    MixedPrecisionPolicy): every trained weight is cast once a step. `gradient` is the dtype for sums over microbatches
    (gradient accumulation).
    """

    _parameter: Name = setting(
        "parameter dtype in the optimizer (master weights)",
        default="float32",
        alias="parameter",
        check=_describe_float16_fault,
    )
    _compute: Name | None = setting(
        "activation and weight dtype in layers; default: the parameter dtype",
        default=None,
        alias="compute",
        check=_describe_float16_fault,
    )
    _gradient: Name | None = setting(
        "gradient dtype, also for gradient accumulation; default: the parameter dtype",
        default=None,
        alias="gradient",
        check=_describe_float16_fault,
    )
    _reduce: Name = setting(
        "smallest dtype for sums over ranks", default="float32", alias="reduce", check=_describe_reduce_dtype_fault
    )
    uncast: tuple[str, ...] = setting(
        'name patterns of parameters that layers use without a cast: "*norm.weight"', default=()
    )

    def __attrs_post_init__(self) -> None:
        """Raise ValueError for combinations that `check` rejects in a recipe."""
        conflicts = find_dtype_conflicts_and_remedies(self._parameter, self._compute, self._gradient, self.uncast)
        for _, text, hint in conflicts:
            raise ValueError(f"{text}; {hint}")

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Yield problems from conflicting dtypes."""
        values = node.settings
        for key, text, hint in find_dtype_conflicts_and_remedies(
            values["parameter"], values["compute"], values["gradient"], values["uncast"]
        ):
            yield node.problem(key, text, hint)

    @property
    def parameter(self) -> torch.dtype:
        return DTYPES[self._parameter]

    @property
    def compute(self) -> torch.dtype:
        return DTYPES[self._compute or self._parameter]

    @property
    def gradient(self) -> torch.dtype:
        return DTYPES[self._gradient or self._parameter]

    @property
    def reduce(self) -> torch.dtype:
        return DTYPES[self._reduce]


def find_dtype_conflicts_and_remedies(
    parameter: str, compute: str | None, gradient: str | None, uncast: tuple[str, ...]
) -> Iterator[tuple[str, str, str]]:
    """Yield these settings' conflicts: the key, the fault, and the remedy."""
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
