"""
Operation costs, for planning a run on the meta device.

An operation registers functions for its matrix product FLOPs and its scratch memory. They take the operation's
arguments by the names in its schema, so a new argument does not change a cost. FLOPs of torch's own operations come
from `torch.utils.flop_counter`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, TypedDict

import torch
from torch._ops import OpOverload, OpOverloadPacket

FlopsFunction = Callable[..., float]
"""Return the floating-point operations of an operation's matrix products, from some of its arguments by name."""

ScratchFunction = Callable[..., int]
"""Return the most bytes that exist only while an operation runs, from some of its arguments by name."""


class CostFunctions(TypedDict, total=False):
    """
    An operation's cost functions; left out, a cost is zero.

    `equivalent_flops` returns the FLOPs of a large product that takes as long, if tiles do more than the operation's.
    """

    flops: FlopsFunction
    scratch: ScratchFunction
    equivalent_flops: FlopsFunction


@dataclass(frozen=True)
class OperationCosts:
    """
    Matrix product FLOPs, scratch memory in bytes, whether the operation is attention, and `equivalent_flops`: the FLOPs
    of a large product that takes as long.
    """

    flops: float = 0.0
    scratch: int = 0
    is_attention: bool = False
    equivalent_flops: float = 0.0


@dataclass(frozen=True)
class _Registration:
    """An operation's cost functions."""

    flops: FlopsFunction
    scratch: ScratchFunction
    is_attention: bool
    equivalent_flops: FlopsFunction

    def compute_costs(self, arguments: Mapping[str, Any]) -> OperationCosts:
        return OperationCosts(
            _call_with_named_arguments(self.flops, arguments),
            _call_with_named_arguments(self.scratch, arguments),
            self.is_attention,
            _call_with_named_arguments(self.equivalent_flops, arguments),
        )


REGISTERED: dict[OpOverloadPacket, _Registration] = {}


def register_costs(
    operation: OpOverloadPacket,
    *,
    flops: FlopsFunction = lambda: 0.0,
    scratch: ScratchFunction = lambda: 0,
    equivalent_flops: FlopsFunction | None = None,
    is_attention: bool = False,
) -> None:
    """
    Register an operation's cost functions, whose parameters name some of the operation's arguments.

    Raises TypeError if a parameter is not an argument in the operation's schema.
    """
    known = {argument.name for argument in operation.default._schema.arguments}
    for function in (flops, scratch, equivalent_flops or flops):
        if unknown := sorted(signature(function).parameters.keys() - known):
            raise TypeError(f"{operation} does not have the arguments {unknown} of {function.__qualname__}")
    REGISTERED[operation] = _Registration(flops, scratch, is_attention, equivalent_flops or flops)


def compute_operation_costs(
    operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> OperationCosts:
    """Return a call's costs, as registered by the operation, or else the FLOPs counted by torch."""
    registration = REGISTERED.get(operator.overloadpacket)
    if registration is not None:
        return registration.compute_costs(bind_arguments(operator, args, kwargs))
    flops = _count_flops_by_torch(operator, args, kwargs, result)
    return OperationCosts(flops, equivalent_flops=flops)


def bind_arguments(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments, and the omitted defaults, by their names in the operator's schema."""
    arguments = operator._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    positional = {argument.name: value for argument, value in zip(arguments, args, strict=False)}
    return defaults | positional | dict(kwargs)


_ALLOCATIONS = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "set_")
)


def accesses_elements(operator: OpOverload, allocates: bool) -> bool:
    """
    Return whether an operator reads or writes tensor elements.

    `allocates` is whether any result has new memory. Other results, unless the operator changes an argument, are views
    or properties of shapes.
    """
    if operator.overloadpacket in _ALLOCATIONS:
        return False
    return allocates or bool(operator._schema.is_mutable)


def _call_with_named_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a cost function with the arguments named like its parameters."""
    return function(**{name: arguments[name] for name in signature(function).parameters})


def _count_flops_by_torch(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> float:
    from torch.utils.flop_counter import flop_registry  # imports triton, which takes most of a second

    count = flop_registry.get(operator.overloadpacket)
    # torch's functions take the result's shape where some overloads take a dtype.
    operands = [argument for argument in args if not isinstance(argument, torch.dtype)]
    return 0.0 if count is None else float(count(*operands, **kwargs, out_val=result))
