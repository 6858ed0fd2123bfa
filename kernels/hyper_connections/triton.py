"""
Hyper-connections in Triton: a program mixes, writes and reads the streams of several tokens, some channels at a time.

The first pass over channels stores streams and multiplies them by the projection, and the second reads the next
branch's input. Backward, the first pass has the gradients of the weights to read, and the second all others. Parameters
have sums of programs' sums as gradients, in a fixed order.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from drawloom.kernels.hyper_connections.eager import ROUNDS, ConnectedStreams, Connection
from drawloom.kernels.operation import as_new_alias, make_differentiable, register_kernel
from drawloom.kernels.triton.primitives import (
    cache_launches,
    cdiv,
    check_floats,
    contiguous_last_dim,
    get_dot_precision,
    limit_registers,
    load_float32,
    load_or_zero,
    mask_tile,
    next_power_of_2,
)

FiveTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

TILE = 1024
"""Tokens times channels that a program processes at a time: 16 bytes of each stream per thread in half precision."""

REGISTERS = 168
"""Most registers of a thread, so that three programs share a multiprocessor; the backward pass spills a few."""

MIXES = 128
"""Elements of mixing matrices that a program normalizes, one by thread: it keeps all rounds in registers."""


def connect_streams_triton(
    streams: Tensor, output: Tensor | None, before: Tensor | None, connection: Connection | None
) -> ConnectedStreams:
    """Compute connect_streams_eager for float32, bfloat16 and float16."""
    check_floats("connect_streams_triton", streams)
    projection, static, scale, eps, constrained = connection or (None, None, None, 0.0, False)
    results = _differentiable_connect(streams, output, before, projection, static, scale, eps, constrained)
    return ConnectedStreams(*results)


def _connect_and_save(streams: Tensor, output: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    """Return streams, inputs and weights, and tensors for the backward pass."""
    results = _connect(streams, output, *arguments)
    connected = as_new_alias(streams) if output is None else results[0]
    return connected, *results[1:3], connected, *results[2:]


def _compute_gradients(*values: Any) -> tuple[Tensor, ...]:
    """Return gradients of the streams, the output and its weights, and the parameters."""
    *arguments, constrained, connected, weights, logits, rstd = values
    projection = arguments[6]
    *input_grads, products, sums = _connect_backward(*arguments[:9], connected, weights, logits, rstd, constrained)  # type: ignore[call-arg]
    if projection is None:
        return tuple(input_grads)
    outputs = products.flatten(-2) if constrained else products.mT
    rows = outputs.flatten(0, -2).to(connected.dtype)
    # Tensor cores need rows of 16 bytes.
    padded = F.pad(rows, (0, -rows.shape[1] % 8)).T @ connected.reshape(len(rows), -1)
    to_static, to_scale = sums.sum(0)
    return *input_grads, padded[: len(projection)], to_static, to_scale.sum(1)


def _allocate(streams: Tensor, output: Tensor | None, projection: Tensor | None) -> FiveTensors:
    """Return streams, inputs, weights, and the weights' logits and 1 / rms, all empty."""
    *leading, count, width = streams.shape
    connected = streams.new_empty(0 if output is None else streams.shape)
    inputs = streams.new_empty(0 if projection is None else [*leading, width])
    size = [0] if projection is None else [*leading, count + 2, count]
    weights, logits, rstd = (streams.new_empty(size, dtype=torch.float32) for _ in range(3))
    return connected, inputs, weights, logits, rstd


@register_kernel("connect_streams", _allocate)
def _connect(
    results: FiveTensors,
    streams: Tensor,
    output: Tensor | None,
    before: Tensor | None,
    projection: Tensor | None,
    static: Tensor | None,
    scale: Tensor | None,
    eps: float,
    constrained: bool,
) -> None:
    tensors = output, before, projection, static, scale, *results
    _launch(_connect_kernel, streams, tensors, constrained, eps)
    if constrained:
        _normalize(results[2], static, scale, results[3], backward=False)


def _allocate_gradients(
    streams: Tensor, output: Tensor | None, before: Tensor | None, weights: Tensor, constrained: bool
) -> FiveTensors:
    """Return gradients of streams, output, its weights and products by token, and programs' sums, all empty."""
    tokens = streams[..., 0, 0].numel()
    programs = cdiv(tokens, count_program_tokens(constrained))
    return (
        streams.new_empty(streams.shape),
        streams.new_empty(0 if output is None else output.shape),
        weights.new_zeros(0 if before is None else before.shape),
        weights.new_empty(weights.shape),
        weights.new_empty(programs, 2, *weights.shape[-2:]),
    )


@register_kernel("connect_streams_backward", _allocate_gradients)
def _connect_backward(
    results: FiveTensors,
    grad_connected: Tensor,
    grad_inputs: Tensor,
    grad_weights: Tensor,
    streams: Tensor,
    output: Tensor | None,
    before: Tensor | None,
    projection: Tensor | None,
    static: Tensor | None,
    scale: Tensor | None,
    connected: Tensor,
    weights: Tensor,
    logits: Tensor,
    rstd: Tensor,
    constrained: bool,
) -> None:
    if constrained:
        grad_weights = grad_weights.clone(memory_format=torch.contiguous_format)
        _normalize(grad_weights, static, scale, logits, backward=True)
    grads = grad_connected, grad_inputs, grad_weights
    tensors = *grads, output, before, projection, scale, connected, weights, logits, rstd, *results
    _launch(_connect_backward_kernel, streams, tensors, constrained)


_differentiable_connect = make_differentiable(_connect_and_save, _compute_gradients, 3)


def count_program_tokens(constrained: bool) -> int:
    """
    Return a program's tokens: few, so that all programs' streams fit the GPU's cache until they are loaded again.

    A constrained connection's projection is as large as the streams of 24 tokens, so more tokens share its loads.
    """
    return 16 if constrained else 4


def _launch(kernel: Any, streams: Tensor, tensors: Sequence[Tensor | None], constrained: bool, *numbers: float) -> None:
    rows = contiguous_last_dim(streams.reshape(-1, *streams.shape[-2:]))
    count, streams_count, width = rows.shape
    tokens = count_program_tokens(constrained)
    if not count:
        return
    kernel[(cdiv(count, tokens),)](
        rows,
        *(None if tensor is None else tensor.contiguous() for tensor in tensors),
        count,
        width,
        *rows.stride()[:2],
        *numbers,
        STREAMS=streams_count,
        OUTPUTS=max(16, next_power_of_2(streams_count * (streams_count + 2))),
        TOKENS=tokens,
        BLOCK=TILE // tokens,
        CONSTRAINED=constrained,
        PRECISION=get_dot_precision(),
        num_warps=4,
        enable_fp_fusion=True,
        **limit_registers(REGISTERS),
    )


def _normalize(weights: Tensor, static: Tensor | None, scale: Tensor | None, logits: Tensor, backward: bool) -> None:
    """Replace weights to mix in (..., n + 2, n) by normalized ones, or their gradients by the logits' gradients."""
    count = weights.shape[-1]
    tokens, size = weights[..., 0, 0].numel(), next_power_of_2(count)
    programs = cdiv(tokens * size * size, MIXES)
    if tokens:
        _normalize_kernel[(programs,)](
            weights,
            static,
            scale,
            logits,
            tokens,
            STREAMS=count,
            SIZE=size,
            TOKENS=MIXES // size**2,
            ROUNDS=ROUNDS,
            BACKWARD=backward,
            num_warps=4,
            enable_fp_fusion=True,
        )


@triton.jit
def _append(values, value):
    """Return a tuple with one more value."""
    return values + (value,)


@triton.jit
def _load_in_turn(first, inside, step, NUMBER: tl.constexpr):
    """Load numbers or tiles `step` apart."""
    loaded = ()
    for number in tl.static_range(NUMBER):
        loaded = _append(loaded, load_float32(first + number * step, inside))
    return loaded


@triton.jit
def _repeat(value, NUMBER: tl.constexpr):
    """Return a tuple of equal elements."""
    values = ()
    for _ in tl.static_range(NUMBER):
        values = _append(values, value)
    return values


@triton.jit
def _sum_by_thread(tile):
    """Sum 8 channels, which a thread has anyway, so that threads exchange their sums only once, after all channels."""
    return tl.sum(tl.reshape(tile, (tile.shape[0], tile.shape[1] // 8, 8)), 2)


@triton.jit
def _add_products(sums, first: tl.constexpr, tiles, tile, NUMBER: tl.constexpr):
    """Return sums from `first` on plus tiles' products with one tile, summed by thread."""
    added = ()
    for number in tl.static_range(NUMBER):
        added = _append(added, sums[first + number] + _sum_by_thread(tiles[number] * tile))
    return added


@triton.jit
def _combine(tiles, weights, first: tl.constexpr, step: tl.constexpr, STREAMS: tl.constexpr):
    """Return the sum of tiles, multiplied by weights (tokens,) from `first` on."""
    total = tiles[0] * weights[first][:, None]
    for stream in tl.static_range(1, STREAMS):
        total += tiles[stream] * weights[first + stream * step][:, None]
    return total


@triton.jit
def _uses_stream(column, stream, STREAMS: tl.constexpr, CONSTRAINED: tl.constexpr):
    """Return whether weights' logits are computed from a stream, by column of (n + 2, n)."""
    return (column < STREAMS * (STREAMS + 2)) & ((column % STREAMS == stream) | CONSTRAINED)


# fmt: off
@cache_launches("count")
def _connect_kernel(
    streams, output, before, projection, static, scale, connected, inputs, weights, logits, rstd, count, width,
    stride, stream_stride, eps, STREAMS: tl.constexpr, OUTPUTS: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK: tl.constexpr, CONSTRAINED: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    SIZE: tl.constexpr = STREAMS * (STREAMS + 2)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside, column = token < count, tl.arange(0, OUTPUTS)
    source, step = streams + token[:, None] * stride, stream_stride
    if output is not None:
        mixing = _load_in_turn(before + token * SIZE, inside, 1, SIZE)
        source, step = connected + token[:, None] * (STREAMS * width), width
    products = tl.zeros((TOKENS, OUTPUTS), tl.float32)
    zeros = tl.zeros((TOKENS, BLOCK // 8), tl.float32)
    squares, partial = _repeat(zeros, STREAMS), _repeat(zeros, SIZE)
    for first in tl.range(0, width, BLOCK, num_stages=1):  # loads follow stores
        channel = first + tl.arange(0, BLOCK)
        within = mask_tile(inside, channel < width)
        tiles = _load_in_turn(streams + token[:, None] * stride + channel[None, :], within, stream_stride, STREAMS)
        if output is not None:
            added = load_float32(output + token[:, None] * width + channel[None, :], within)
            old, tiles = tiles, ()
            for stream in tl.static_range(STREAMS):
                mixed = _combine(old, mixing, (2 + stream) * STREAMS, 1, STREAMS)
                mixed += mixing[STREAMS + stream][:, None] * added
                mixed = mixed.to(streams.dtype.element_ty)
                tl.store(source + channel[None, :] + stream * width, mixed, mask=within)
                tiles = _append(tiles, mixed.to(tl.float32))
            if CONSTRAINED:
                tl.debug_barrier()  # Loaded again, because in the product's layout all warps would mix all streams.
                tiles = _load_in_turn(source + channel[None, :], within, step, STREAMS)
        if projection is not None:
            if not CONSTRAINED:
                rows = tl.broadcast_to(projection + channel[None, :], (TOKENS, BLOCK))
                factors = _load_in_turn(rows, within, width, STREAMS + 2)
            all_squares, totals = (), ()
            for stream in tl.static_range(STREAMS):
                tile = tiles[stream]
                all_squares = _append(all_squares, squares[stream] + _sum_by_thread(tile * tile))
                if CONSTRAINED:
                    used = mask_tile(channel < width, column < SIZE)
                    rows = projection + (column * STREAMS + stream)[None, :] * width + channel[:, None]
                    factors = load_or_zero(rows, used)
                    products = tl.dot(tile.to(factors.dtype), factors, products, input_precision=PRECISION)
                else:
                    totals = totals + _add_products(partial, stream * (STREAMS + 2), factors, tile, STREAMS + 2)
            squares = all_squares
            partial = partial if CONSTRAINED else totals
    if projection is not None:
        row, index = column // STREAMS, token[:, None] * SIZE + column[None, :]
        known = mask_tile(inside, column < SIZE)
        total = tl.zeros((TOKENS, OUTPUTS), tl.float32)
        for stream in tl.static_range(STREAMS):
            used = _uses_stream(column, stream, STREAMS, CONSTRAINED)[None, :]
            total += tl.where(used, tl.sum(squares[stream], 1)[:, None], 0.0)
            for number in tl.static_range(0 if CONSTRAINED else STREAMS + 2):
                product = tl.sum(partial[stream * (STREAMS + 2) + number], 1)
                products += tl.where(column[None, :] == number * STREAMS + stream, product[:, None], 0.0)
        inverse = tl.rsqrt(total / (width * (STREAMS if CONSTRAINED else 1)) + eps)
        products *= inverse
        tl.store(rstd + index, inverse, mask=known)
        tl.store(logits + index, products, mask=known)
        start = load_or_zero(static + column, column < SIZE)[None, :]
        factor = load_or_zero(scale + row, column < SIZE)[None, :]
        if CONSTRAINED:
            values = tl.sigmoid(start + factor * products) * (row + 1)[None, :]
        else:
            values = start + factor * (2.0 * tl.sigmoid(2.0 * products) - 1.0)
        tl.store(weights + index, values, mask=known)
        tl.debug_barrier()  # Other threads have stored streams and weights.
        reading = _load_in_turn(weights + token * SIZE, inside, 1, STREAMS)
        for first in range(0, width, BLOCK):
            channel = first + tl.arange(0, BLOCK)
            within = mask_tile(inside, channel < width)
            tiles = _load_in_turn(source + channel[None, :], within, step, STREAMS)
            read = _combine(tiles, reading, 0, 1, STREAMS)
            tl.store(inputs + token[:, None] * width + channel[None, :], read, mask=within)


# fmt: off
@cache_launches("count")
def _connect_backward_kernel(
    streams, grad_connected, grad_inputs, grad_weights, output, before, projection, scale, connected, weights,
    logits, rstd, grad_streams, grad_output, grad_before, grad_products, sums, count, width, stride, stream_stride,
    STREAMS: tl.constexpr, OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    CONSTRAINED: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    SIZE: tl.constexpr = STREAMS * (STREAMS + 2)
    ROWS: tl.constexpr = SIZE if CONSTRAINED else STREAMS + 2
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside, zeros = token < count, tl.zeros((TOKENS, BLOCK // 8), tl.float32)
    source, step = streams + token[:, None] * stride, stream_stride
    if output is not None:
        mixing = _load_in_turn(before + token * SIZE, inside, 1, SIZE)
        source, step = connected + token[:, None] * (STREAMS * width), width
    if projection is not None:
        along = _repeat(zeros, STREAMS)
        for first in range(0, width, BLOCK):
            channel = first + tl.arange(0, BLOCK)
            within = mask_tile(inside, channel < width)
            tiles = _load_in_turn(source + channel[None, :], within, step, STREAMS)
            to_read = load_float32(grad_inputs + token[:, None] * width + channel[None, :], within)
            along = _add_products(along, 0, tiles, to_read, STREAMS)
        column = tl.arange(0, OUTPUTS)
        row, by_weight = column // STREAMS, token[:, None] * SIZE + column[None, :]
        known = mask_tile(inside, column < SIZE)
        to_weights = load_or_zero(grad_weights + by_weight, known)
        for stream in tl.static_range(STREAMS):
            to_weights += tl.where(column[None, :] == stream, tl.sum(along[stream], 1)[:, None], 0.0)
        products, inverse = load_or_zero(logits + by_weight, known), load_or_zero(rstd + by_weight, known)
        factor = load_or_zero(scale + row, column < SIZE)[None, :]
        if CONSTRAINED:
            values, largest = load_or_zero(weights + by_weight, known), (row + 1)[None, :]
            to_weights *= tl.where(row[None, :] < 2, values * (1.0 - values / largest), 1.0)
            to_scale, slope = to_weights * products, factor
        else:
            dynamic = 2.0 * tl.sigmoid(2.0 * products) - 1.0
            to_scale, slope = to_weights * dynamic, factor * (1.0 - dynamic * dynamic)
        own_sums = sums + tl.program_id(0) * (2 * SIZE) + column
        tl.store(own_sums, tl.sum(to_weights, 0), mask=column < SIZE)
        tl.store(own_sums + SIZE, tl.sum(to_scale, 0), mask=column < SIZE)
        to_products = to_weights * slope * inverse
        tl.store(grad_products + by_weight, to_products, mask=known)
        tl.debug_barrier()
        to_products *= products * inverse / (width * (STREAMS if CONSTRAINED else 1))
        shrinking = ()
        for stream in tl.static_range(STREAMS):
            used = _uses_stream(column, stream, STREAMS, CONSTRAINED)[None, :]
            shrinking = _append(shrinking, tl.sum(tl.where(used, to_products, 0.0), 1))
        reading = _load_in_turn(weights + token * SIZE, inside, 1, STREAMS)
    dots = _repeat(zeros, STREAMS * (STREAMS + 1))
    for first in range(0, width, BLOCK):
        channel = first + tl.arange(0, BLOCK)
        within = mask_tile(inside, channel < width)
        index = token[:, None] * width + channel[None, :]
        if projection is not None:
            to_read = load_float32(grad_inputs + index, within)
        by_stream = index + token[:, None] * ((STREAMS - 1) * width)
        grads, totals = (), ()
        for stream in tl.static_range(STREAMS):
            grad = load_float32(grad_connected + by_stream + stream * width, within)
            if projection is not None:
                tile = load_float32(source + channel[None, :] + stream * step, within)
                grad += reading[stream][:, None] * to_read - shrinking[stream][:, None] * tile
                # No tl.dot, because its layout would spread to everything here, and divide rows among warps.
                for number in tl.range(0, ROWS, loop_unroll_factor=2):
                    product = number if CONSTRAINED else number * STREAMS + stream
                    used_row = number * STREAMS + stream if CONSTRAINED else number
                    factors = tl.broadcast_to(projection + used_row * width + channel[None, :], (TOKENS, BLOCK))
                    to_product = load_or_zero(grad_products + token * SIZE + product, inside)
                    grad += to_product[:, None] * load_float32(factors, within)
            grads = _append(grads, grad)
        if output is None:
            for stream in tl.static_range(STREAMS):
                tl.store(grad_streams + by_stream + stream * width, grads[stream], mask=within)
        else:
            added = load_float32(output + index, within)
            old = streams + token[:, None] * stride + channel[None, :]
            factors = (added,) + _load_in_turn(old, within, stream_stride, STREAMS)
            for stream in tl.static_range(STREAMS):
                grad = _combine(grads, mixing, 2 * STREAMS + stream, STREAMS, STREAMS)
                tl.store(grad_streams + by_stream + stream * width, grad, mask=within)
                totals = totals + _add_products(dots, stream * (STREAMS + 1), factors, grads[stream], STREAMS + 1)
            dots = totals
            tl.store(grad_output + index, _combine(grads, mixing, STREAMS, 1, STREAMS), mask=within)
    if output is not None:
        for number in tl.static_range(STREAMS * (STREAMS + 1)):
            stream, other = number // (STREAMS + 1), number % (STREAMS + 1) - 1
            weight = STREAMS + stream if other < 0 else (2 + stream) * STREAMS + other
            tl.store(grad_before + token * SIZE + weight, tl.sum(dots[number], 1), mask=inside)


@triton.jit
def _log_softmax(logs, between, DIMENSION: tl.constexpr):
    """Return normalized logarithms, and very small ones outside of the streams."""
    logs -= tl.max(logs, DIMENSION, keep_dims=True)
    return tl.where(between, logs - tl.log(tl.sum(tl.exp(logs), DIMENSION, keep_dims=True)), -1e30)


# fmt: off
@cache_launches("count")
def _normalize_kernel(
    weights, static, scale, logits, count, STREAMS: tl.constexpr, SIZE: tl.constexpr, TOKENS: tl.constexpr,
    ROUNDS: tl.constexpr, BACKWARD: tl.constexpr,
):
    # fmt: on
    token = (tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS))[:, None, None]
    to_stream, from_stream = tl.arange(0, SIZE)[None, :, None], tl.arange(0, SIZE)[None, None, :]
    between = (to_stream < STREAMS) & (from_stream < STREAMS)
    known, column = between & (token < count), (2 + to_stream) * STREAMS + from_stream
    index = token * ((STREAMS + 2) * STREAMS) + column
    start, factor = load_or_zero(static + column, between), load_or_zero(scale + 2 + to_stream, to_stream < STREAMS)
    logs = tl.where(between, start + factor * load_or_zero(logits + index, known), -1e30)
    rounds = ()
    for _ in tl.static_range(ROUNDS):
        columns = _log_softmax(logs, between, 1)
        logs = _log_softmax(columns, between, 2)
        rounds = _append(_append(rounds, columns), logs)
    values = tl.exp(logs)
    if BACKWARD:
        values *= load_or_zero(weights + index, known)
        for step in tl.static_range(2 * ROUNDS):
            values -= tl.exp(rounds[2 * ROUNDS - 1 - step]) * tl.sum(values, 2 - step % 2, keep_dims=True)
    tl.store(weights + index, values, mask=known)
