"""FLOPs and scratch memory registered by operations for plans."""

import pkgutil
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

import drawloom.kernels
import support.kernels  # noqa: F401, for kernels in Triton's interpreter
from drawloom.kernels.operation import (
    REGISTERED,
    accesses_elements,
    bind_arguments,
    compute_operation_costs,
    register_costs,
    register_operator,
)

META = torch.device("meta")
NUMBERS = count()


def kernel_operations() -> Iterator[Any]:
    """Return all operations registered with torch by modules of kernels/."""
    for module in pkgutil.walk_packages(drawloom.kernels.__path__, "drawloom.kernels."):
        import_module(module.name)
    for name in torch._C._dispatch_get_all_op_names():
        space, _, operation = name.partition("::")
        if space == "drawloom" and operation != "collective" and not operation.startswith("test_"):
            yield getattr(torch.ops.drawloom, operation)


def test_every_operation_of_kernels_registers_its_costs() -> None:
    """Every kernel registers FLOPs and scratch memory for plans, also if it has none."""
    operations = list(kernel_operations())
    assert len(operations) >= 20
    assert [str(operation) for operation in operations if operation not in REGISTERED] == []


def multiply(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def multiply_after_others(other: Tensor, size: int, a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def product(function: Callable[..., Tensor], *leading: Any) -> Any:
    """Register a product of two matrices, and return its costs for (3, 4) times (4, 5) after the leading arguments."""
    name = f"test_product_{next(NUMBERS)}"
    register_operator(
        name,
        lambda a, b: a.new_empty(3, 5),
        flops=lambda a, b: 2.0 * a.numel() * b.shape[1],
        scratch=lambda b: b.nbytes,
    )(function)
    operator = getattr(torch.ops.drawloom, name).default
    arguments = *leading, torch.empty(3, 4, device=META), torch.empty(4, 5, device=META)
    return compute_operation_costs(operator, arguments, {}, operator(*arguments))


def test_an_argument_in_front_does_not_change_costs() -> None:
    """Costs read arguments by name, so that a plan cannot take one argument for another."""
    before = product(multiply)
    after = product(multiply_after_others, torch.empty(7, 7, device=META), 9)
    assert before == after
    assert (before.flops, before.scratch, before.is_attention) == (2 * 3 * 4 * 5, 4 * 5 * 4, False)


def test_a_cost_function_of_an_unknown_argument_is_an_error() -> None:
    """A renamed argument fails when the module is imported, and not in a plan."""
    with pytest.raises(TypeError, match=r"does not have the arguments \['queries'\]"):
        register_costs(torch.ops.drawloom.attention, flops=lambda queries: 0.0)
    register = register_operator("test_unknown", lambda a: a.new_empty(3, 5), scratch=len)
    with pytest.raises(TypeError, match="does not have the arguments"):
        register(multiply)


def test_arguments_have_the_names_of_the_schema() -> None:
    """Positional and named arguments and defaults that a call leaves out are all found by name."""
    a, b, c = (torch.empty(2, 2, device=META) for _ in range(3))
    arguments = bind_arguments(torch.ops.aten.addmm.default, (a, b, c), {"alpha": 2})
    assert arguments["mat2"] is c and (arguments["alpha"], arguments["beta"]) == (2, 1)


@pytest.mark.parametrize("wide", [False, True])
def test_torch_products_have_the_flops_that_torch_counts(wide: bool) -> None:
    """A matrix product, with or without a sum, has two FLOPs per pair of factors in every overload."""
    a, b = (torch.empty(shape, device=META, dtype=torch.bfloat16) for shape in ((3, 4), (4, 5)))
    result = torch.empty(3, 5, device=META, dtype=torch.float32 if wide else torch.bfloat16)
    kwargs: dict[str, Any] = {"out": result} if wide else {}
    operator: Any = torch.ops.aten.addmm.dtype_out if wide else torch.ops.aten.addmm.default
    arguments = (result, a, b, torch.float32) if wide else (result, a, b)
    assert compute_operation_costs(operator, arguments, kwargs, result).flops == 2 * 3 * 4 * 5
    assert compute_operation_costs(torch.ops.aten.mm.default, (a, b), {}, result).flops == 2 * 3 * 4 * 5
    assert compute_operation_costs(torch.ops.aten.add.Tensor, (result, result), {}, result).flops == 0


def test_grouped_products_of_torch_count_their_rows() -> None:
    """Every row of a grouped product, which torch does not count, is multiplied by one matrix."""
    x, weight = torch.empty(6, 4, device=META), torch.empty(3, 4, 5, device=META)
    offsets = torch.empty(3, device=META, dtype=torch.int32)
    costs = compute_operation_costs(torch.ops.aten._grouped_mm.default, (x, weight, offsets), {}, torch.empty(6, 5))
    assert costs.flops == 2 * 6 * 4 * 5


@pytest.mark.parametrize(
    ("operator", "allocates", "expected"),
    [
        (torch.ops.aten.view.default, False, False),
        (torch.ops.aten._unsafe_view.default, False, False),
        (torch.ops.aten.is_same_size.default, False, False),
        (torch.ops.aten.empty_like.default, True, False),
        (torch.ops.aten.clone.default, True, True),
        (torch.ops.aten.add_.Tensor, False, True),
    ],
)
def test_views_and_allocations_move_no_data(operator: Any, allocates: bool, expected: bool) -> None:
    """A view and an uninitialized tensor cost no memory traffic, but a copy and a change in place do."""
    assert accesses_elements(operator, allocates) == expected


def test_attention_costs_count_all_pairs() -> None:
    """The forward pass has two products of queries and keys, the backward pass five, and only it has scratch memory."""
    q = torch.empty(2, 8, 4, 16, device=META, dtype=torch.bfloat16)
    k = v = torch.empty(2, 8, 2, 16, device=META, dtype=torch.bfloat16)
    pairs = 2 * 4 * 8 * 8
    forward = compute_operation_costs(torch.ops.drawloom.attention.default, (q, k, v), {}, None)
    backward = compute_operation_costs(torch.ops.drawloom.attention_backward.default, (q, q, k, v), {}, None)
    assert (forward.flops, forward.scratch, forward.is_attention) == (2 * 2 * 16 * pairs, 0, True)
    narrow = torch.empty(2, 8, 2, 4, device=META, dtype=torch.bfloat16)
    narrow_forward = compute_operation_costs(torch.ops.drawloom.attention.default, (q, k, narrow), {}, None)
    narrow_backward = compute_operation_costs(
        torch.ops.drawloom.attention_backward.default, (q, q, k, narrow), {}, None
    )
    assert (narrow_forward.flops, narrow_backward.flops) == (2 * (16 + 4) * pairs, 2 * (3 * 16 + 2 * 4) * pairs)
    sums, repeated = 4 * q.numel(), 2 * q.nbytes
    assert (backward.flops, backward.scratch) == (5 * 2 * 16 * pairs, sums + repeated)


def logits(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states (256, 64), an output weight (512, 64) and targets (256,) on the meta device."""
    hidden, weight = (torch.empty(rows, 64, device=META, dtype=dtype) for rows in (256, 512))
    return hidden, weight, torch.empty(256, device=META, dtype=torch.int64)


@pytest.mark.parametrize(("needs_hidden", "needs_weight"), [(True, True), (True, False), (False, False)])
def test_cross_entropy_costs_count_the_gradients_that_are_needed(needs_hidden: bool, needs_weight: bool) -> None:
    """Both backward passes have a product for the logits and one for each gradient; chunks bound their memory."""
    hidden, weight, targets = logits(torch.bfloat16)
    products = 1 + needs_hidden + needs_weight
    whole = compute_operation_costs(
        torch.ops.drawloom.linear_cross_entropy.default,
        (hidden, weight, targets, targets, -100, needs_hidden, needs_weight, 1000),
        {},
        None,
    )
    assert (whole.flops, whole.scratch) == (2 * 256 * 512 * 64 * products, 2 * 1000)
    cut = compute_operation_costs(
        torch.ops.drawloom.cut_cross_entropy_backward.default,
        (hidden, weight, targets, targets, targets, None, 0.0, 128, 256, 1000, needs_hidden, needs_weight),
        {},
        None,
    )
    assert (cut.flops, cut.scratch) == (whole.flops, 2 * 1000 + 4 * weight.numel() * needs_weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_filter_sorts_the_weight_and_its_gradient(dtype: torch.dtype) -> None:
    """Beside the result, a filtered backward pass has float32 sums in sorted order, and the sorted weight."""
    hidden, weight, targets = logits(dtype)
    inputs = hidden, weight, targets, targets, targets, None
    operator = torch.ops.drawloom.cut_cross_entropy_backward.default
    cut = compute_operation_costs(operator, (*inputs, 0.1, 128, 256, 0, True, True), {}, None)
    assert cut.scratch == 4 * weight.numel() + weight.nbytes


def test_more_chosen_keys_than_keys_have_scores() -> None:
    """The choice pads the scores (tokens, keys) of few keys to the number of chosen ones."""
    import_module("drawloom.kernels.sparse_attention.triton")
    queries, keys = torch.empty(2, 8, 4, 16, device=META), torch.empty(2, 32, 16, device=META)
    for chosen, columns in ((4, 32), (64, 64)):
        inputs = queries, keys, torch.empty(2, 8, 4, device=META), *torch.empty(2, 2, 8, device=META, dtype=torch.int32)
        costs = compute_operation_costs(torch.ops.drawloom.choose_keys.default, (*inputs, chosen), {}, None)
        assert costs.scratch == 4 * 2 * 8 * columns


def test_logits_that_are_written_and_dropped_are_scratch_memory() -> None:
    """All logits in a forward pass without gradients are scratch, and so are some float32 logits in `cut`."""
    hidden, weight, targets = logits(torch.bfloat16)
    operator = torch.ops.drawloom.linear_cross_entropy_grad_logits.default
    scratch = [
        compute_operation_costs(operator, (hidden, weight, targets, -100, needed), {}, None).scratch
        for needed in (0, 1)
    ]
    assert scratch == [2 * 256 * 512, 0]
    for dtype, expected in ((torch.bfloat16, 0), (torch.float32, 4 * 1000)):
        inputs = *logits(dtype), 128, 256, 1000
        assert (
            compute_operation_costs(torch.ops.drawloom.cut_cross_entropy.default, inputs, {}, None).scratch == expected
        )


def test_grouped_products_cost_the_padding_and_start_of_tiles() -> None:
    """The work grows as rows per expert shrink; with 2,048 rows it is 702 / 620 of the FLOPs, as measured."""
    list(kernel_operations())
    operator = torch.ops.drawloom.grouped_gemm_rows.default
    ratios = []
    for rows in (262_144, 65_536):
        x, weight = torch.empty(rows, 2048, device=META), torch.empty(128, 2048, 1536, device=META)
        arguments = x, weight, torch.empty(128, dtype=torch.int32, device=META)
        costs = compute_operation_costs(operator, arguments, {}, operator(*arguments))
        assert costs.flops == 2.0 * rows * 2048 * 1536
        ratios.append(costs.equivalent_flops / costs.flops)
    assert ratios[0] == pytest.approx(702 / 620, rel=0.05)
    assert ratios[1] > 1.05 * ratios[0]
