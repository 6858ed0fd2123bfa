"""
Cross entropy of a linear layer's logits, with as many logits at a time as may exist together (Triton and torch).

torch's matrix product computes logits, a kernel overwrites them with their gradients, and two more products turn these
into the hidden states' and the weight's gradients. There are three products in all; computing logits again for the
backward pass would make it four.

The backward pass adds a factor for each token. If all logits' gradients fit, the factors are applied before the
products. Otherwise the forward pass computes both gradients for some tokens at a time, times the tokens' weights. A
factor that all tokens share, as in a sum of losses, then scales these gradients; with other factors, or if a loss
depends on lse, the gradients are computed from scratch.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.cut_cross_entropy import (
    EXACT,
    LogitCut,
    NeededGradients,
    compute_logit_grad_factors,
    count_logits_bytes,
    pass_none_for_unused_grads,
    reshape_and_weight_losses,
)
from drawloom.kernels.deferred_grads import (
    MatrixProduct,
    WeightGradient,
    compute_at_once_if_hooked,
    get_weight_gradient_function,
)
from drawloom.kernels.operation import once_differentiable, register_kernel, register_operator
from drawloom.kernels.results import TokenLosses
from drawloom.kernels.triton.cut_cross_entropy import count_gradient_flops, cut_cross_entropy_triton
from drawloom.kernels.triton.launch import cache_launches
from drawloom.kernels.triton.primitives import addmm_fp32, check_floats, next_power_of_2
from drawloom.kernels.vocab_parallel import find_local_target_rows

MAX_LOGITS = 5 * 2**28
"""Limit on logits in memory at once: 2.5 GiB in bfloat16, or 8192 tokens by 160 thousand words."""

TINY = torch.finfo(torch.float32).tiny

MULTIPLE = 128
"""Divisor of a chunk's token count, for whole tiles in torch's matrix products."""

BLOCK, DEPTH = 4096, 2
"""Logits in a block, 8 per thread, and blocks that a program reads before it updates the maximum."""


def linear_cross_entropy_triton(
    hidden: Tensor, weight: Tensor, targets: Tensor, cut: LogitCut = EXACT, token_weights: Tensor | None = None
) -> TokenLosses:
    """
    Compute linear_cross_entropy_eager, float32 (...), for float32, bfloat16 and float16.

    hidden (..., width), weight (vocabulary, width), targets int64 (...), token_weights float32 (...). A target outside
    the vocabulary has a NaN loss.
    """
    check_floats("linear_cross_entropy_triton", hidden, weight)
    tokens, flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    if cut.part is not None:
        return cut_cross_entropy_triton(hidden, weight, targets, cut, token_weights)
    common = tokens, weight, flat, cut.ignore_index, torch.is_grad_enabled(), get_weight_gradient_function(weight)
    if len(tokens) * len(weight) <= MAX_LOGITS:
        return reshape_and_weight_losses(*_WholeLogits.apply(*common), targets, token_weights)  # type: ignore[no-untyped-call]
    factors = (flat != cut.ignore_index).to(torch.float32)
    if token_weights is not None:
        factors = factors * token_weights.detach().reshape(-1)
    return reshape_and_weight_losses(*_InChunks.apply(*common, factors), targets, None)  # type: ignore[no-untyped-call]


@compute_at_once_if_hooked
class _WholeLogits(Function):
    """Cross entropy that keeps all logits' gradients; token factors multiply the small factors in both products."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        ignore_index: int,
        wants_gradients: bool,
        weight_gradient: WeightGradient,
    ) -> tuple[Tensor, Tensor]:
        """Return losses and lse, float32 (tokens,), for hidden (tokens, width) and weight (vocabulary, width)."""
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        needed = wants_gradients and (needs_hidden or needs_weight)
        losses, lse, grad_logits = _compute_losses_and_grad_logits(hidden, weight, targets, ignore_index, needed)
        ctx.save_for_backward(hidden if needs_weight else None, weight if needs_hidden else None, targets, grad_logits)
        ctx.ignore_index, ctx.weight_gradient, ctx.vocab = ignore_index, weight_gradient, len(weight)
        pass_none_for_unused_grads(ctx)
        return losses, lse

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_losses: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        hidden, weight, targets, grad_logits = ctx.saved_tensors
        grad, grad_lse = compute_logit_grad_factors(grad_losses, grad_lse, targets != ctx.ignore_index, torch.float32)
        inputs = [grad.unsqueeze(-1)]
        if grad_lse is not None:
            local = find_local_target_rows(targets, ctx.vocab, ctx.ignore_index, None)
            is_word = (local >= 0) & (local < ctx.vocab)
            inputs += [local.where(is_word, 0), grad_lse.where(is_word, 0).unsqueeze(-1)]
        grad_hidden = None if weight is None else _compute_hidden_gradient(grad_logits, weight, *inputs)
        grad_weight = None
        if hidden is not None:
            is_product = grad_lse is None and hidden.dtype != torch.float16
            compute = _WEIGHT_PRODUCT if is_product else _compute_weight_gradient
            grad_weight = ctx.weight_gradient(compute, grad_logits, hidden.detach(), *inputs)
        return grad_hidden, grad_weight, None, None, None, None


def _compute_hidden_gradient(
    grad_logits: Tensor, weight: Tensor, grad: Tensor, targets: Tensor | None = None, grad_lse: Tensor | None = None
) -> Tensor:
    """Return (grad_logits @ weight) * grad + weight[targets] * grad_lse, with grad and grad_lse (tokens, 1)."""
    result = (grad_logits @ weight) * grad
    if targets is not None and grad_lse is not None:
        result = result + weight[targets] * grad_lse
    return result.to(grad_logits.dtype)


def _compute_weight_gradient(
    grad_logits: Tensor, hidden: Tensor, grad: Tensor, targets: Tensor | None = None, grad_lse: Tensor | None = None
) -> Tensor:
    """Return grad_logits.T @ (hidden * grad), plus hidden * grad_lse in the targets' rows; grads are (tokens, 1)."""
    result = _multiply_with_row_factors(grad_logits, hidden, grad)
    if targets is None or grad_lse is None:
        return result
    # bfloat16 has the range of float32; in float16 the small factors of a sum over many tokens would be lost.
    dtype = torch.float32 if hidden.dtype == torch.float16 else hidden.dtype
    rows = (hidden * grad_lse).to(dtype)
    # index_add_ adds in any order on a GPU; this operation is deterministic.
    on_targets: Tensor = torch.ops.aten.embedding_dense_backward(rows, targets, grad_logits.shape[1], -1, False)
    return (result + on_targets).to(result.dtype)


_WEIGHT_PRODUCT = MatrixProduct(lambda grad_logits, hidden, grad: (grad_logits.T, (hidden * grad).to(hidden.dtype)))
"""Weight gradient where no loss depends on lse, except in float16, which would lose small factors."""


def _multiply_with_row_factors(grad_logits: Tensor, hidden: Tensor, grad: Tensor) -> Tensor:
    """Return grad_logits.T @ (hidden * grad), where grad (tokens, 1) may be too small for a product in float16."""
    if grad_logits.dtype != torch.float16:
        return grad_logits.T @ (hidden * grad).to(grad_logits.dtype)
    largest = grad.abs().amax().clamp_min(TINY) if len(grad) else grad.sum()
    product = grad_logits.T @ (hidden * (grad / largest)).to(grad_logits.dtype)
    return (product.float() * largest).to(grad_logits.dtype)


@compute_at_once_if_hooked
class _InChunks(Function):
    """
    Cross entropy whose forward pass also computes gradients, for the sum of losses times `factors`.

    The backward pass multiplies these by the losses' gradients. It recomputes the weight's gradient if the losses'
    gradients differ, and everything if lse has a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        ignore_index: int,
        wants_gradients: bool,
        weight_gradient: WeightGradient,
        factors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return losses and lse like `_WholeLogits`; `factors`, float32 (tokens,), multiply losses and gradients."""
        needs_hidden, needs_weight = (wants_gradients and needs_grad for needs_grad in ctx.needs_input_grad[:2])
        inputs = hidden, weight, targets, factors, ignore_index
        losses, lse, grad_hidden, grad_weight = _forward(*inputs, needs_hidden, needs_weight, MAX_LOGITS)
        ctx.save_for_backward(hidden, weight, targets, factors, lse, grad_hidden, grad_weight)
        ctx.ignore_index, ctx.weight_gradient = ignore_index, weight_gradient
        pass_none_for_unused_grads(ctx)
        return losses, lse

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_losses: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None]:
        hidden, weight, targets, factors, lse, sum_grad_hidden, sum_grad_weight = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        if grad_losses is None or grad_lse is not None:
            grad_hidden, grad_weight = _recompute_both_gradients(ctx, grad_losses, grad_lse)
            return grad_hidden, grad_weight, None, None, None, None, None
        is_uniform = not grad_losses.numel() or grad_losses.stride(0) == 0 or grad_losses.numel() == 1
        finite = grad_losses.where(targets != ctx.ignore_index, 0)
        grad_hidden = (sum_grad_hidden * finite.unsqueeze(-1)).to(hidden.dtype) if needs_hidden else None
        if not needs_weight:
            return grad_hidden, None, None, None, None, None, None
        if is_uniform:
            grad_weight = ctx.weight_gradient(_scale_and_cast_gradient, sum_grad_weight, grad_losses[:1], weight)
        else:
            local = find_local_target_rows(targets, len(weight), ctx.ignore_index, None)
            grad_weight = ctx.weight_gradient(_recompute_weight_gradient, hidden, weight, local, lse, finite * factors)
        return grad_hidden, grad_weight, None, None, None, None, None


def _recompute_both_gradients(
    ctx: Any, grad_losses: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return hidden and weight gradients from recomputed logits: lse has a gradient, unknown in the forward pass."""
    hidden, weight, targets, factors, lse, *_ = ctx.saved_tensors
    needs_hidden, needs_weight = ctx.needs_input_grad[:2]
    weighted_grad = None if grad_losses is None else grad_losses.where(targets != ctx.ignore_index, 0) * factors
    grad, grad_lse = compute_logit_grad_factors(weighted_grad, grad_lse, targets != ctx.ignore_index, torch.float32)
    local = find_local_target_rows(targets, len(weight), ctx.ignore_index, None)
    inputs = [hidden, weight, local, lse, grad] + ([] if grad_lse is None else [grad_lse])
    grad_weight = ctx.weight_gradient(_recompute_weight_gradient, *inputs) if needs_weight else None
    if not needs_hidden:
        return None, grad_weight
    grad_hidden, _ = cut_cross_entropy_triton.backward(
        hidden, weight, local, lse, grad, grad_lse, EXACT, NeededGradients(True, False)
    )
    return grad_hidden, grad_weight


def _scale_and_cast_gradient(gradient: Tensor, factor: Tensor, weight: Tensor) -> Tensor:
    """Scale a gradient, and cast it to the sums' dtype; without tokens there is no factor."""
    dtype = weight.grad_dtype if weight.is_leaf else weight.dtype
    return (gradient * factor if len(factor) else gradient).to(dtype=dtype)


def _recompute_weight_gradient(
    hidden: Tensor, weight: Tensor, targets: Tensor, lse: Tensor, grad: Tensor, grad_lse: Tensor | None = None
) -> Tensor:
    """Compute the weight's gradient from recomputed logits."""
    inputs = hidden, weight, targets, lse, grad, grad_lse
    _, grad_weight = cut_cross_entropy_triton.backward(*inputs, EXACT, NeededGradients(False, True))
    return grad_weight  # type: ignore[return-value]


def _allocate_losses_and_grad_logits(hidden: Tensor, weight: Tensor, needed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses and lse by token, and the logits' gradients, empty if not needed."""
    losses = hidden.new_empty(len(hidden), dtype=torch.float32)
    return losses, torch.empty_like(losses), hidden.new_empty((len(hidden), len(weight)) if needed else 0)


def _count_unreturned_logits_bytes(hidden: Tensor, weight: Tensor, needed: bool) -> int:
    # Logits whose gradients are needed are a result.
    return 0 if needed else count_logits_bytes(hidden, weight, MAX_LOGITS)


@register_operator(
    "linear_cross_entropy_grad_logits",
    _allocate_losses_and_grad_logits,
    flops=lambda hidden, weight: 2.0 * hidden.numel() * len(weight),
    scratch=_count_unreturned_logits_bytes,
)
def _compute_losses_and_grad_logits(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, needed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    losses = hidden.new_empty(len(hidden), dtype=torch.float32)
    lse = torch.empty_like(losses)
    logits = hidden @ weight.T
    _fill_losses_and_grad_logits(logits, targets, losses, lse, None, ignore_index, needed)
    return losses, lse, logits if needed else hidden.new_empty(0)


def _allocate_forward(
    hidden: Tensor, weight: Tensor, needs_hidden: bool, needs_weight: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return losses and lse by token, and gradients for the sum of losses, empty if not needed."""
    losses = hidden.new_empty(len(hidden), dtype=torch.float32)
    grad_hidden = hidden.new_empty(hidden.shape if needs_hidden else 0)
    grad_weight = weight.new_empty(weight.shape if needs_weight else 0, dtype=torch.float32)
    return losses, torch.empty_like(losses), grad_hidden, grad_weight


@register_kernel("linear_cross_entropy", _allocate_forward, flops=count_gradient_flops, scratch=count_logits_bytes)
def _forward(
    results: tuple[Tensor, Tensor, Tensor, Tensor],
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    factors: Tensor,
    ignore_index: int,
    needs_hidden: bool,
    needs_weight: bool,
    max_logits: int,
) -> None:
    losses, lse, grad_hidden, grad_weight = results
    grad_weight.zero_()
    wants_gradients = needs_hidden or needs_weight
    for chunk in _split_token_chunks(len(hidden), len(weight), max_logits):
        part = hidden[chunk]
        logits = part @ weight.T
        _fill_losses_and_grad_logits(
            logits, targets[chunk], losses[chunk], lse[chunk], factors[chunk], ignore_index, wants_gradients
        )
        if needs_hidden:
            torch.mm(logits, weight, out=grad_hidden[chunk])
        if needs_weight:
            addmm_fp32(grad_weight, logits.T, part)
        del logits  # or they would live until the next chunk's are computed


def _split_token_chunks(tokens: int, vocab: int, max_logits: int) -> Iterator[slice]:
    """Return slices with nearly equal sizes, within `max_logits` if MULTIPLE tokens are."""
    max_tokens = max(1, max_logits // (vocab * MULTIPLE)) * MULTIPLE
    parts = max(1, -(-tokens // max_tokens))
    size = max(1, -(-tokens // parts // MULTIPLE)) * MULTIPLE
    return (slice(start, start + size) for start in range(0, tokens, size))


def _fill_losses_and_grad_logits(
    logits: Tensor,
    targets: Tensor,
    losses: Tensor,
    lse: Tensor,
    factors: Tensor | None,
    ignore_index: int,
    wants_gradients: bool,
) -> None:
    """
    Fill losses and lse (tokens,); if `wants_gradients`, overwrite logits (tokens, vocabulary) with the losses'
    gradients.

    Losses and gradients are multiplied by `factors` (tokens,). Without factors, ignored tokens get lse's gradients, and
    the backward pass masks them.
    """
    tokens, vocab = logits.shape
    block = min(BLOCK, next_power_of_2(vocab))
    if not logits.numel():
        return
    _cross_entropy_kernel[(tokens,)](
        logits,
        targets.contiguous(),
        losses,
        lse,
        factors,
        vocab,
        logits.stride(0),
        ignore_index,
        LEARNS=wants_gradients,
        BLOCK=block,
        DEPTH=DEPTH,
        num_warps=max(1, block // 256),
        enable_fp_fusion=True,
    )


# fmt: off
@cache_launches
@triton.jit(do_not_specialize=["ignore_index"])
def _cross_entropy_kernel(
    logits, targets, losses, lse, factors, words, stride, ignore_index,
    LEARNS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
):
    # fmt: on
    token = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + token)
    logits += token * stride
    word = tl.arange(0, DEPTH)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    largest = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, words, DEPTH * BLOCK):
        inside = start + word < words
        values = tl.load(logits + start + word, mask=inside, other=0.0).to(tl.float32)
        values = tl.where(inside, values, -1e38)  # -inf minus -inf would be NaN
        previous, largest = largest, tl.maximum(largest, tl.max(values, 0))
        total = total * tl.exp(previous - largest) + tl.sum(tl.exp(values - largest[None, :]), 0)
    row_max = tl.max(largest, 0)
    row_lse = row_max + tl.log(tl.sum(total * tl.exp(largest - row_max), 0))
    exists = (target >= 0) & (target < words)
    target_logit = tl.load(logits + target, mask=exists, other=0.0).to(tl.float32)
    loss = tl.where(exists, row_lse - target_logit, float("nan"))
    loss = tl.where(target == ignore_index, 0.0, loss)
    factor = 1.0
    if factors is not None:
        factor = tl.load(factors + token)
    tl.store(losses + token, loss * factor)
    tl.store(lse + token, row_lse)
    if not LEARNS:
        return
    # The target's logit is read before any warp writes gradients over it.
    tl.debug_barrier()
    learned = tl.where(target == ignore_index, -1, target)
    for start in range(0, words, DEPTH * BLOCK):
        inside = start + word < words
        values = tl.load(logits + start + word, mask=inside, other=0.0).to(tl.float32)
        values = tl.exp(values - row_lse) - tl.where(start + word == learned, 1.0, 0.0)
        tl.store(logits + start + word, (factor * values).to(logits.dtype.element_ty), mask=inside)
