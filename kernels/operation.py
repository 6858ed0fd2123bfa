"""
Custom operators: functions that launch kernels, registered with torch so that torch.compile does not trace into them.

For planning a run on the meta device, an operator registers functions for its matrix product FLOPs and its scratch
memory. They take the operator's arguments by the names in its schema, so a new argument does not change a cost. FLOPs
of torch's own operations come from `torch.utils.flop_counter`.

The module also decides in which dtype kernels accumulate.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from inspect import Signature, signature
from itertools import zip_longest
from operator import itemgetter
from typing import Any, Concatenate, ParamSpec, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd import Function
from torch.autograd.function import once_differentiable as differentiable_once
from torch.compiler import is_dynamo_compiling

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


CONCRETE_TYPES = (Tensor, torch.nn.Parameter)
"""Types of tensors with data; subclasses, such as fake tensors and DTensor, must go through the dispatcher."""

Arguments = ParamSpec("Arguments")
Results = TypeVar("Results")


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """
    Decorate an autograd Function's `backward`, below `staticmethod`, like torch's decorator of this name.

    It takes less host time: torch's enters a no_grad context, but a backward pass without `create_graph` already runs
    in one.
    """
    checked: Callable[..., Any] = differentiable_once(backward)

    @wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        return checked(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return call


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Return the accumulation dtype for x (any shape): float32 for half precision, else x's dtype."""
    return torch.promote_types(x.dtype, torch.float32)


def upcast(x: Tensor) -> Tensor:
    """Cast x (any shape) to the kernels' accumulation dtype."""
    return x.to(accumulation_dtype(x))


def as_new_alias(result: Tensor) -> Tensor:
    """
    Return an autograd Function's result (any shape and dtype) as a new tensor on the same storage.

    Without it, torch 2.11's compiler confuses the result of an in-place operation, or of `to` without a change, with
    another tensor, and the Function's input gradients are zeros.
    """
    return result.detach()


def register_kernel(
    name: str, results: Callable[..., Any], **costs: Unpack[CostFunctions]
) -> Callable[[Callable[Concatenate[Results, Arguments], None]], Callable[Arguments, Results]]:
    """
    Register a function that launches kernels as the operator `drawloom::<name>`.

    The function fills its first parameter, a tensor or a tuple of tensors; its other parameters are the operator's
    arguments. `results` allocates the first parameter, and its parameters name some of the operator's arguments.
    Otherwise this is `register_operator`, with `results` as `fake`.
    """

    def register(launch: Callable[..., None]) -> Any:
        filled, *parameters = signature(launch).parameters.values()
        select = _create_argument_selector(results, [parameter.name for parameter in parameters])

        @wraps(launch)
        def allocate_and_launch(*arguments: Any) -> Any:
            allocated = results(*select(arguments))
            launch(allocated, *arguments)
            return allocated

        # torch infers the operator's schema from this signature.
        schema = Signature(parameters, return_annotation=filled.annotation)
        allocate_and_launch.__signature__ = schema  # type: ignore[attr-defined]
        return register_operator(name, results, **costs)(allocate_and_launch)

    return register


def register_operator(
    name: str,
    fake: Callable[..., Any],
    mutates: Sequence[str] = (),
    is_opaque: bool = False,
    **costs: Unpack[CostFunctions],
) -> Callable[[Callable[Arguments, Results]], Callable[Arguments, Results]]:
    """
    Register a function as the operator `drawloom::<name>`, which torch.compile does not trace.

    The schema follows from the function's types and from `mutates`, the arguments that change in place. `fake` returns
    empty results. The parameters of `fake`, and of the functions in `costs`, name some of the operator's arguments.
    Under torch.compile, and for fake and meta tensors, the decorated function calls the operator; otherwise it calls
    the function directly, unless the operator `is_opaque`: then counters of operations see it as one. It takes
    positional arguments.
    """

    def register(function: Callable[..., Any]) -> Any:
        qualified_name = f"drawloom::{name}"
        select = _create_argument_selector(fake, [*signature(function).parameters])
        torch.library.define(qualified_name, torch.library.infer_schema(function, mutates_args=mutates))
        torch.library.impl(qualified_name, ("CPU", "CUDA"), function)
        torch.library.register_fake(qualified_name, lambda *arguments: fake(*select(arguments)))
        operation = getattr(torch.ops.drawloom, name)
        register_costs(operation, **costs)
        operator = operation.default

        @wraps(function)
        def call_function_or_operator(*arguments: Any) -> Any:
            # torch's dispatcher takes longer than a launch, so eager code avoids it.
            first = arguments[0][0] if isinstance(arguments[0], list) else arguments[0]
            is_concrete = not is_opaque and type(first) in CONCRETE_TYPES and not first.is_meta
            return function(*arguments) if is_concrete and not is_dynamo_compiling() else operator(*arguments)

        return call_function_or_operator

    return register


def _create_argument_selector(
    function: Callable[..., Any], names: list[str]
) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Return a function that selects the arguments named like the parameters of `function`, from arguments `names`."""
    positions = [names.index(parameter) for parameter in signature(function).parameters]
    if len(positions) > 1:
        return itemgetter(*positions)
    first = sum(positions)
    return itemgetter(slice(first, first + len(positions)))  # a tuple, unlike that of one position


def differentiable(
    backward: Callable[..., Sequence[Tensor | None]],
) -> Callable[[Callable[Arguments, Results]], Callable[Arguments, Results]]:
    """Give a function of positional arguments the gradients of `backward`; see `make_differentiable`."""
    return lambda forward: make_differentiable(forward, backward)


def make_differentiable(
    forward: Callable[Arguments, Results], backward: Callable[..., Sequence[Tensor | None]], results: int | None = None
) -> Callable[Arguments, Results]:
    """
    Return `forward` with gradients: autograd saves its arguments, which are tensors or constants.

    With `results`, `forward` returns only its first so many results, and autograd saves the others. `backward` takes
    the results' gradients, the arguments and the saved results. It returns the gradients of the first arguments; those
    that are not needed are dropped.
    """

    def save_and_compute(ctx: Any, *arguments: Any) -> Any:
        computed: Any = forward(*arguments)  # type: ignore[call-arg]
        values = *arguments, *(() if results is None else computed[results:])
        ctx.save_for_backward(*(value if isinstance(value, Tensor) else None for value in values))
        ctx.constants = [None if isinstance(value, Tensor) else value for value in values]
        return computed if results is None else computed[:results]

    def compute_gradients(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        both = zip(ctx.saved_tensors, ctx.constants, strict=True)
        values = [constant if tensor is None else tensor for tensor, constant in both]
        computed = zip_longest(ctx.needs_input_grad, backward(*grads, *values))
        return tuple(gradient if needed else None for needed, gradient in computed)

    methods = {
        "forward": staticmethod(save_and_compute),
        "backward": staticmethod(once_differentiable(compute_gradients)),
    }
    function: Any = type(forward.__name__, (Function,), methods)
    differentiable: Callable[Arguments, Results] = function.apply
    return differentiable
