"""
Hyper-connections in Triton: a program mixes, writes and reads the streams of several tokens, some channels at a time.

The first pass over channels stores streams and multiplies them by the projection, and the second reads the next
branch's input. Backward, the first pass has the gradients of the weights to read, and the second all others. A second
pass begins with the last channels, which are still in the cache. Parameters' gradients are sums of programs' sums, in a
fixed order.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

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
    parameters = (None,) * 5 + (0.0, 0, False) if connection is None else connection
    return ConnectedStreams(*_differentiable_connect(streams, output, before, *parameters))


def _connect_and_save(streams: Tensor, output: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    """Return streams, inputs and weights, and tensors for the backward pass."""
    results = _connect(streams, output, *arguments)
    connected = as_new_alias(streams) if output is None else results[0]
    return connected, *results[1:3], connected, *results[2:]


def _compute_gradients(*values: Any) -> tuple[Tensor, ...]:
    """Return gradients of the streams, the output and its weights, and the parameters."""
    *arguments, read, _write, mix, scale, _eps, _first, constrained, connected, weights, logits, rstd = values
    saved = mix, scale, weights, logits, rstd, constrained
    *input_grads, products, sums = _connect_backward(*arguments, *saved)  # type: ignore[call-arg]
    projection = arguments[-1]
    if projection is None:
        return tuple(input_grads)
    to_projection = products.T @ connected.reshape(len(products), -1)
    to_static, to_scales = sums.sum(0)
    to_read, to_write, to_mix = to_static.to(read.dtype).split([1, 1, len(mix)])
    by_row = to_scales.sum(1)
    mixes = by_row[2:].sum(0, keepdim=True)
    to_scale = torch.cat([by_row[:2], mixes] if constrained else [by_row[:1] + mixes, by_row[1:2]]).to(scale.dtype)
    parameter_grads = to_read[0], to_write[0], to_mix if constrained else to_mix.T, to_scale
    return *input_grads, to_projection[: len(projection)], *parameter_grads


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
    read: Tensor | None,
    write: Tensor | None,
    mix: Tensor | None,
    scale: Tensor | None,
    eps: float,
    first: int,
    constrained: bool,
) -> None:
    tensors = output, before, projection, read, write, mix, scale, *results
    _launch(_connect_kernel, streams, tensors, constrained, eps, first)
    if constrained:
        _normalize(results[2], mix, scale, results[3], backward=False)


def _allocate_gradients(
    streams: Tensor, output: Tensor | None, before: Tensor | None, weights: Tensor, constrained: bool
) -> FiveTensors:
    """
    Return gradients of streams, output, its weights and products, and programs' sums, all empty.

    Products are padded by output, since tensor cores need rows of 16 bytes.
    """
    count, tokens = streams.shape[-2], streams[..., 0, 0].numel()
    rows, outputs = (tokens, count * (count + 2)) if constrained else (tokens * count, count + 2)
    return (
        streams.new_empty(streams.shape),
        streams.new_empty(0 if output is None else output.shape),
        weights.new_zeros(0 if before is None else before.shape),
        streams.new_empty(rows, cdiv(outputs, 8) * 8),
        weights.new_empty(cdiv(tokens, count_program_tokens(constrained)), 2, *weights.shape[-2:]),
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
    mix: Tensor | None,
    scale: Tensor | None,
    weights: Tensor,
    logits: Tensor,
    rstd: Tensor,
    constrained: bool,
) -> None:
    if constrained:
        grad_weights = grad_weights.clone(memory_format=torch.contiguous_format)
        _normalize(grad_weights, mix, scale, logits, backward=True)
    grads = grad_connected, grad_inputs, grad_weights
    tensors = *grads, output, before, projection, scale, weights, logits, rstd, *results
    _launch(_connect_backward_kernel, streams, tensors, constrained)


_differentiable_connect = make_differentiable(_connect_and_save, _compute_gradients, 3)


def count_program_tokens(constrained: bool) -> int:
    """
    Return a program's tokens: few, so that the GPU's cache still has all programs' streams in the second pass.

    A constrained connection's projection is as large as the streams of 24 tokens, so more tokens share its loads.
    """
    return 16 if constrained else 2


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
        **limit_registers(REGISTERS),
    )


def _normalize(weights: Tensor, mix: Tensor | None, scale: Tensor | None, logits: Tensor, backward: bool) -> None:
    """Replace weights to mix in (..., n + 2, n) by normalized ones, or their gradients by the logits' gradients."""
    count = weights.shape[-1]
    tokens, size = weights[..., 0, 0].numel(), next_power_of_2(count)
    programs = cdiv(tokens * size * size, MIXES)
    if tokens:
        _normalize_kernel[(programs,)](
            weights,
            mix,
            scale,
            logits,
            tokens,
            STREAMS=count,
            SIZE=size,
            TOKENS=MIXES // size**2,
            ROUNDS=ROUNDS,
            BACKWARD=backward,
        )


@triton.jit
def _append(values, value):
    """Return a tuple with one more value."""
    return values + (value,)


@triton.jit
def _load_in_turn(first, inside, step, NUMBER: constexpr):
    """Load numbers or tiles `step` apart."""
    loaded = ()
    for number in tl.static_range(NUMBER):
        loaded = _append(loaded, load_float32(first + number * step, inside))
    return loaded


@triton.jit
def _repeat(value, NUMBER: constexpr):
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
def _add_products(sums, first: constexpr, tiles, tile, NUMBER: constexpr):
    """Return sums from `first` on plus tiles' products with one tile, summed by thread."""
    added = ()
    for number in tl.static_range(NUMBER):
        added = _append(added, sums[first + number] + _sum_by_thread(tiles[number] * tile))
    return added


@triton.jit
def _add_scaled(tiles, weights, tile, STREAMS: constexpr):
    """Add to each stream's tile another one, multiplied by the stream's weights (tokens,)."""
    added = ()
    for stream in tl.static_range(STREAMS):
        added = _append(added, tiles[stream] + weights[stream][:, None] * tile)
    return added


@triton.jit
def _combine(tiles, weights, first: constexpr, step: constexpr, STREAMS: constexpr):
    """Return the sum of tiles, multiplied by weights (tokens,) from `first` on."""
    total = tiles[0] * weights[first][:, None]
    for stream in tl.static_range(1, STREAMS):
        total += tiles[stream] * weights[first + stream * step][:, None]
    return total


@triton.jit
def _mix_streams(tiles, added, weights, dtype: constexpr, STREAMS: constexpr):
    """Return streams' tiles after a branch, rounded as in memory."""
    mixed = ()
    for stream in tl.static_range(STREAMS):
        total = _combine(tiles, weights, (2 + stream) * STREAMS, 1, STREAMS)
        total += weights[STREAMS + stream][:, None] * added
        mixed = _append(mixed, total.to(dtype).to(tl.float32))
    return mixed


@triton.jit
def _load_static(read, write, mix, column, first, STREAMS: constexpr, CONSTRAINED: constexpr):
    """Load static weights by column of (n + 2, n), and add the initial ones."""
    row, stream = column // STREAMS, column % STREAMS
    if CONSTRAINED:
        part = tl.where(stream == first, 0.8, 0.0) + 0.2 / STREAMS
        initial = tl.where(row == 0, tl.log(part / (1.0 - part)), tl.where(row == stream + 2, 8.0, 0.0))
        mixes = mix + column - 2 * STREAMS
    else:
        initial = tl.where((row == 1) | (row == stream + 2) | ((row == 0) & (stream == first)), 1.0, 0.0)
        mixes = mix + stream * STREAMS + row - 2
    initial += load_float32(read + stream, row == 0) + load_float32(write + stream, row == 1)
    return initial + load_float32(mixes, (row > 1) & (row < STREAMS + 2))


@triton.jit
def _load_scale(scale, column, STREAMS: constexpr, CONSTRAINED: constexpr):
    """Load the dynamic weights' scales by column of (n + 2, n)."""
    row = column // STREAMS
    index = tl.minimum(row, 2) if CONSTRAINED else tl.where(row == 1, 1, 0)
    return load_float32(scale + index, row < STREAMS + 2)


@triton.jit
def _uses_stream(column, stream, STREAMS: constexpr, CONSTRAINED: constexpr):
    """Return whether weights' logits are computed from a stream, by column of (n + 2, n)."""
    return (column < STREAMS * (STREAMS + 2)) & ((column % STREAMS == stream) | CONSTRAINED)


# fmt: off
@cache_launches("count", "first_read")
def _connect_kernel(
    streams, output, before, projection, read, write, mix, scale, connected, inputs, weights, logits, rstd, count,
    width, stride, stream_stride, eps, first_read, STREAMS: constexpr, OUTPUTS: constexpr, TOKENS: constexpr,
    BLOCK: constexpr, CONSTRAINED: constexpr, PRECISION: constexpr,
):
    # fmt: on
    SIZE: constexpr = STREAMS * (STREAMS + 2)
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
            tiles = _mix_streams(tiles, added, mixing, streams.dtype.element_ty, STREAMS)
            for stream in tl.static_range(STREAMS):
                tl.store(source + channel[None, :] + stream * width, tiles[stream], mask=within)
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
        sum_of_squares = tl.zeros((TOKENS, OUTPUTS), tl.float32)
        for stream in tl.static_range(STREAMS):
            used = _uses_stream(column, stream, STREAMS, CONSTRAINED)[None, :]
            sum_of_squares += tl.where(used, tl.sum(squares[stream], 1)[:, None], 0.0)
            for number in tl.static_range(0 if CONSTRAINED else STREAMS + 2):
                product = tl.sum(partial[stream * (STREAMS + 2) + number], 1)
                products += tl.where(column[None, :] == number * STREAMS + stream, product[:, None], 0.0)
        inverse = tl.rsqrt(sum_of_squares / (width * (STREAMS if CONSTRAINED else 1)) + eps)
        products *= inverse
        tl.store(rstd + index, inverse, mask=known)
        tl.store(logits + index, products, mask=known)
        start = _load_static(read, write, mix, column, first_read, STREAMS, CONSTRAINED)[None, :]
        factor = _load_scale(scale, column, STREAMS, CONSTRAINED)[None, :]
        if CONSTRAINED:
            values = tl.sigmoid(start + factor * products) * (row + 1)[None, :]
        else:
            values = start + factor * (2.0 * tl.sigmoid(2.0 * products) - 1.0)
        tl.store(weights + index, values, mask=known)
        tl.debug_barrier()  # Other threads have stored streams and weights.
        reading = _load_in_turn(weights + token * SIZE, inside, 1, STREAMS)
        for first in range(0, width, BLOCK):
            channel = (width - 1) // BLOCK * BLOCK - first + tl.arange(0, BLOCK)
            within = mask_tile(inside, channel < width)
            tiles = _load_in_turn(source + channel[None, :], within, step, STREAMS)
            total = _combine(tiles, reading, 0, 1, STREAMS)
            tl.store(inputs + token[:, None] * width + channel[None, :], total, mask=within)


# fmt: off
@cache_launches("count")
def _connect_backward_kernel(
    streams, grad_connected, grad_inputs, grad_weights, output, before, projection, scale, weights, logits, rstd,
    grad_streams, grad_output, grad_before, grad_products, sums, count, width, stride, stream_stride,
    STREAMS: constexpr, OUTPUTS: constexpr, TOKENS: constexpr, BLOCK: constexpr,
    CONSTRAINED: constexpr, PRECISION: constexpr,
):
    # fmt: on
    SIZE: constexpr = STREAMS * (STREAMS + 2)
    PADDED: constexpr = ((SIZE if CONSTRAINED else STREAMS + 2) + 7) // 8 * 8
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = token < count
    dtype: constexpr = streams.dtype.element_ty
    zeros = tl.zeros((TOKENS, BLOCK // 8), tl.float32)
    if output is not None:
        mixing = _load_in_turn(before + token * SIZE, inside, 1, SIZE)
    if projection is not None:
        along = _repeat(zeros, STREAMS)
        for first in range(0, width, BLOCK):
            channel = first + tl.arange(0, BLOCK)
            within = mask_tile(inside, channel < width)
            tiles = _load_in_turn(streams + token[:, None] * stride + channel[None, :], within, stream_stride, STREAMS)
            index = token[:, None] * width + channel[None, :]
            if output is not None:
                tiles = _mix_streams(tiles, load_float32(output + index, within), mixing, dtype, STREAMS)
            along = _add_products(along, 0, tiles, load_float32(grad_inputs + index, within), STREAMS)
        column = tl.arange(0, OUTPUTS)
        row, by_weight = (column // STREAMS)[None, :], token[:, None] * SIZE + column[None, :]
        known = mask_tile(inside, column < SIZE)
        to_weights = load_or_zero(grad_weights + by_weight, known)
        for stream in tl.static_range(STREAMS):
            to_weights += tl.where(column[None, :] == stream, tl.sum(along[stream], 1)[:, None], 0.0)
        products, inverse = load_or_zero(logits + by_weight, known), load_or_zero(rstd + by_weight, known)
        factor = _load_scale(scale, column, STREAMS, CONSTRAINED)[None, :]
        if CONSTRAINED:
            values = load_or_zero(weights + by_weight, known)
            to_weights *= tl.where(row < 2, values * (1.0 - values / (row + 1)), 1.0)
            to_scale, slope, by_product = to_weights * products, factor, token[:, None] * PADDED + column[None, :]
        else:
            dynamic = 2.0 * tl.sigmoid(2.0 * products) - 1.0
            to_scale, slope = to_weights * dynamic, factor * (1.0 - dynamic * dynamic)
            by_product = (token[:, None] * STREAMS + column[None, :] % STREAMS) * PADDED + row
        own_sums = sums + tl.program_id(0) * (2 * SIZE) + column
        tl.store(own_sums, tl.sum(to_weights, 0), mask=column < SIZE)
        tl.store(own_sums + SIZE, tl.sum(to_scale, 0), mask=column < SIZE)
        to_products = to_weights * slope * inverse
        rounded = to_products.to(dtype)
        tl.store(grad_products + by_product, rounded, mask=known)
        tl.debug_barrier()
        to_products *= products * inverse / (width * (STREAMS if CONSTRAINED else 1))
        shrinking = ()
        for stream in tl.static_range(STREAMS):
            used = _uses_stream(column, stream, STREAMS, CONSTRAINED)[None, :]
            shrinking = _append(shrinking, tl.sum(tl.where(used, to_products, 0.0), 1))
        reading = _load_in_turn(weights + token * SIZE, inside, 1, STREAMS)
    dots = _repeat(zeros, STREAMS * (STREAMS + 1))
    for first in tl.range(0, width, BLOCK, num_stages=1):  # loads follow stores
        channel = (width - 1) // BLOCK * BLOCK - first + tl.arange(0, BLOCK)
        within = mask_tile(inside, channel < width)
        index = token[:, None] * width + channel[None, :]
        by_stream = index + token[:, None] * ((STREAMS - 1) * width)
        grads = _load_in_turn(grad_connected + by_stream, within, width, STREAMS)
        tiles = _load_in_turn(streams + token[:, None] * stride + channel[None, :], within, stream_stride, STREAMS)
        if output is not None:
            added = load_float32(output + index, within)
        if projection is not None:
            if CONSTRAINED:
                for stream in tl.static_range(STREAMS):
                    rows = projection + (column * STREAMS + stream)[:, None] * width + channel[None, :]
                    factors = load_or_zero(rows, mask_tile(column < SIZE, channel < width))
                    product = tl.dot(rounded, factors, input_precision=PRECISION)
                    tl.store(grad_streams + by_stream + stream * width, product, mask=within)
                tl.debug_barrier()  # Loaded again, because the product's layout would divide rows among warps.
                projected = _load_in_turn(grad_streams + by_stream, within, width, STREAMS)
                tl.debug_barrier()
            else:
                projected = _repeat(tl.zeros((TOKENS, BLOCK), tl.float32), STREAMS)
                by_stream_and_output = grad_products + token * (STREAMS * PADDED)
                for number in tl.static_range(STREAMS + 2):
                    rows = tl.broadcast_to(projection + number * width + channel[None, :], (TOKENS, BLOCK))
                    weight = _load_in_turn(by_stream_and_output + number, inside, PADDED, STREAMS)
                    projected = _add_scaled(projected, weight, load_float32(rows, within), STREAMS)
            connected = tiles
            if output is not None:
                connected = _mix_streams(tiles, added, mixing, dtype, STREAMS)
            grads = _add_scaled(grads, reading, load_float32(grad_inputs + index, within), STREAMS)
            totals = ()
            for stream in tl.static_range(STREAMS):
                total = grads[stream] + projected[stream] - shrinking[stream][:, None] * connected[stream]
                totals = _append(totals, total)
            grads = totals
        if output is None:
            for stream in tl.static_range(STREAMS):
                tl.store(grad_streams + by_stream + stream * width, grads[stream], mask=within)
        else:
            all_dots = ()
            for stream in tl.static_range(STREAMS):
                grad = _combine(grads, mixing, 2 * STREAMS + stream, STREAMS, STREAMS)
                tl.store(grad_streams + by_stream + stream * width, grad, mask=within)
                factors = (added,) + tiles
                all_dots += _add_products(dots, stream * (STREAMS + 1), factors, grads[stream], STREAMS + 1)
            dots = all_dots
            tl.store(grad_output + index, _combine(grads, mixing, STREAMS, 1, STREAMS), mask=within)
    if output is not None:
        for number in tl.static_range(STREAMS * (STREAMS + 1)):
            stream, other = number // (STREAMS + 1), number % (STREAMS + 1) - 1
            weight = STREAMS + stream if other < 0 else (2 + stream) * STREAMS + other
            tl.store(grad_before + token * SIZE + weight, tl.sum(dots[number], 1), mask=inside)


@triton.jit
def _log_softmax(logs, between, DIMENSION: constexpr):
    """Return normalized logarithms, and very small ones outside of the streams."""
    logs -= tl.max(logs, DIMENSION, keep_dims=True)
    return tl.where(between, logs - tl.log(tl.sum(tl.exp(logs), DIMENSION, keep_dims=True)), -1e30)


# fmt: off
@cache_launches("count")
def _normalize_kernel(
    weights, mix, scale, logits, count, STREAMS: constexpr, SIZE: constexpr, TOKENS: constexpr,
    ROUNDS: constexpr, BACKWARD: constexpr,
):
    # fmt: on
    token = (tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS))[:, None, None]
    to_stream, from_stream = tl.arange(0, SIZE)[None, :, None], tl.arange(0, SIZE)[None, None, :]
    between = (to_stream < STREAMS) & (from_stream < STREAMS)
    known, column = between & (token < count), (2 + to_stream) * STREAMS + from_stream
    index = token * ((STREAMS + 2) * STREAMS) + column
    static = load_float32(mix + to_stream * STREAMS + from_stream, between)
    static += tl.where(to_stream == from_stream, 8.0, 0.0)
    products = load_or_zero(logits + index, known)
    logs = tl.where(between, static + tl.load(scale + 2).to(tl.float32) * products, -1e30)
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
