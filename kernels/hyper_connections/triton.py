"""
Hyper-connections in Triton: a program mixes, writes and reads the streams of several tokens, some channels at a time.

The first pass over channels stores streams and multiplies them by the projection, and the second reads the next
branch's input. Backward, the first pass has the gradients of the weights to read, and the second all others; streams
are mixed again instead of loaded. Parameters' gradients are sums over programs' sums in a fixed order.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.hyper_connections.eager import ROUNDS, ConnectedStreams, Connection
from drawloom.kernels.operation import as_new_alias, once_differentiable, register_kernel
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
    parameters = (None, None, None, 0.0, False) if connection is None else connection
    return ConnectedStreams(*_Connect.apply(streams, output, before, *parameters))  # type: ignore[no-untyped-call]


class _Connect(Function):
    """Connection that saves its inputs, and by token and stream n + 2 weights and their logits."""

    @staticmethod
    def forward(
        ctx: Any,
        streams: Tensor,
        output: Tensor | None,
        before: Tensor | None,
        projection: Tensor | None,
        static: Tensor | None,
        scale: Tensor | None,
        eps: float,
        constrained: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        parameters = projection, static, scale
        connected, *read, logits, rstd = _connect(streams, output, before, *parameters, eps, constrained)
        if output is None:
            connected = as_new_alias(streams)
        ctx.save_for_backward(streams, output, before, *parameters, connected, read[1], logits, rstd)
        ctx.constrained = constrained
        return connected, read[0], read[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        streams, output, before, projection, static, scale, connected, *saved = ctx.saved_tensors
        parameters = projection, static, scale
        *input_grads, products, parts = _connect_backward(
            *grads, streams, output, before, *parameters, *saved, ctx.constrained
        )
        if output is None:
            input_grads[1:] = None, None
        if projection is None:
            return *input_grads, *(None,) * 5
        total = parts.sum(0)
        rows = connected.reshape(-1, projection.shape[1])
        grad_projection = (products.T @ rows)[: len(projection)]
        return *input_grads, grad_projection, total[0], total[1].sum(1), None, None


def _allocate(
    streams: Tensor, output: Tensor | None, projection: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return streams, inputs, weights, their logits, and 1 / rms by stream, all empty."""
    *leading, count, width = streams.shape
    by_token = [*leading, count + 2, count]
    sizes = [[0]] * 4 if projection is None else [[*leading, width], by_token, by_token, [*leading, count]]
    small = (streams.new_empty(size, dtype=torch.float32) for size in sizes[1:])
    connected = streams.new_empty(0 if output is None else streams.shape)
    return connected, streams.new_empty(sizes[0]), *small  # type: ignore[return-value]


@register_kernel("connect_streams", _allocate)
def _connect(
    results: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    streams: Tensor,
    output: Tensor | None,
    before: Tensor | None,
    projection: Tensor | None,
    static: Tensor | None,
    scale: Tensor | None,
    eps: float,
    constrained: bool,
) -> None:
    connected, inputs, weights, logits, rstd = results
    if not streams.numel():
        return
    rows, sizes = _view_as_tokens(streams, constrained)
    _connect_kernel[(cdiv(rows.shape[0], sizes["TOKENS"]),)](
        rows,
        None if output is None else output.contiguous(),
        None if before is None else before.contiguous(),
        None if projection is None else projection.contiguous(),
        static,
        scale,
        None if output is None else connected,
        inputs,
        weights,
        logits,
        rstd,
        *rows.shape[::2],
        *rows.stride()[:2],
        eps,
        **sizes,
    )
    if constrained:
        _normalize(weights, static, scale, logits, backward=False)


@register_kernel(
    "connect_streams_backward",
    lambda streams, output, before, projection, constrained: (
        streams.new_empty(streams.shape),
        streams.new_empty(0 if output is None else output.shape),
        streams.new_empty(0 if before is None else before.shape, dtype=torch.float32),
        *_allocate_sums(streams, projection, constrained),
    ),
)
def _connect_backward(
    results: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    grad_connected: Tensor,
    grad_inputs: Tensor,
    grad_weights: Tensor,
    streams: Tensor,
    output: Tensor | None,
    before: Tensor | None,
    projection: Tensor | None,
    static: Tensor | None,
    scale: Tensor | None,
    weights: Tensor,
    logits: Tensor,
    rstd: Tensor,
    constrained: bool,
) -> None:
    if not streams.numel():
        for result in results:
            result.zero_()
        return
    rows, sizes = _view_as_tokens(streams, constrained)
    if constrained:
        grad_weights = grad_weights.clone(memory_format=torch.contiguous_format)
        _normalize(grad_weights, static, scale, logits, backward=True)
    _connect_backward_kernel[(cdiv(rows.shape[0], sizes["TOKENS"]),)](
        grad_connected.contiguous(),
        grad_inputs.contiguous(),
        grad_weights.contiguous(),
        rows,
        None if output is None else output.contiguous(),
        None if before is None else before.contiguous(),
        None if projection is None else projection.contiguous(),
        scale,
        weights,
        logits,
        rstd,
        *results,
        *rows.shape[::2],
        *rows.stride()[:2],
        **sizes,
    )


def _allocate_sums(streams: Tensor, projection: Tensor | None, constrained: bool) -> tuple[Tensor, Tensor]:
    """
    Return gradients of products by the projection's input and output, and programs' sums over tokens, empty.

    Outputs are padded, since tensor cores need rows of 16 bytes.
    """
    *_, count, width = streams.shape
    tokens, size = streams.numel() // max(1, count * width), 0 if projection is None else count + 2
    rows, outputs = (tokens, size * count) if constrained else (tokens * count, size)
    products = streams.new_empty(rows, cdiv(outputs, 8) * 8)
    programs = cdiv(tokens, count_tile_tokens(constrained))
    return products, streams.new_empty(programs, 2, size, count, dtype=torch.float32)


def count_tile_tokens(constrained: bool) -> int:
    """
    Return a program's tokens: few, so that all programs' streams fit the GPU's cache until they are loaded again.

    A constrained connection's projection is as large as the streams of 24 tokens, so more tokens share its loads.
    """
    return 16 if constrained else 4


def _view_as_tokens(streams: Tensor, constrained: bool) -> tuple[Tensor, dict[str, Any]]:
    """Return streams (..., n, width) as (tokens, n, width), and the kernels' sizes."""
    rows = contiguous_last_dim(streams.reshape(-1, *streams.shape[-2:]))
    count = rows.shape[1]
    outputs = max(16, next_power_of_2(count * (count + 2)))
    tokens = count_tile_tokens(constrained)
    sizes = {"STREAMS": count, "OUTPUTS": outputs, "TOKENS": tokens, "BLOCK": TILE // tokens}
    options = limit_registers(REGISTERS) | {"num_warps": 4, "enable_fp_fusion": True}
    return rows, sizes | {"CONSTRAINED": constrained, "PRECISION": get_dot_precision()} | options


def _normalize(weights: Tensor, static: Tensor | None, scale: Tensor | None, logits: Tensor, backward: bool) -> None:
    """Replace weights to mix in (..., n + 2, n) by normalized ones, or their gradients by the logits' gradients."""
    count = weights.shape[-1]
    size = next_power_of_2(count)
    tokens, programs = weights.numel() // (count * (count + 2)), max(1, MIXES // size**2)
    _normalize_kernel[(cdiv(tokens, programs),)](
        weights,
        static,
        scale,
        logits,
        tokens,
        STREAMS=count,
        SIZE=size,
        TOKENS=programs,
        ROUNDS=ROUNDS,
        BACKWARD=backward,
        num_warps=4,
        enable_fp_fusion=True,
    )


@triton.jit
def _load_streams(streams, token, channel, within, stride, stream_stride, STREAMS: tl.constexpr):
    """Load a tile (tokens, channels) of every stream."""
    tiles = ()
    for stream in tl.static_range(STREAMS):
        first = streams + stream * stream_stride + token[:, None] * stride
        tiles = tiles + (load_float32(first + channel[None, :], within),)
    return tiles


@triton.jit
def _load_weights(weights, token, inside, SIZE: tl.constexpr):
    """Load every weight by token."""
    loaded = ()
    for number in tl.static_range(SIZE):
        loaded = loaded + (load_or_zero(weights + token * SIZE + number, inside),)
    return loaded


@triton.jit
def _repeat(value, COUNT: tl.constexpr):
    """Return a tuple of equal elements."""
    values = ()
    for _ in tl.static_range(COUNT):
        values = values + (value,)
    return values


@triton.jit
def _mix_streams(tiles, added, weights, stream: tl.constexpr, STREAMS: tl.constexpr):
    """Return a stream's tile after a branch, rounded as in memory."""
    total = weights[STREAMS + stream][:, None] * added.to(tl.float32)
    for other in tl.static_range(STREAMS):
        total += weights[(2 + stream) * STREAMS + other][:, None] * tiles[other]
    return total.to(added.dtype)


@triton.jit
def _load_projection(
    projection, stream, channel, width, STREAMS: tl.constexpr, OUTPUTS: tl.constexpr, CONSTRAINED: tl.constexpr
):
    """Load (outputs, channels) of the projection that multiplies a stream; outputs are (n + 2, n)."""
    output = tl.arange(0, OUTPUTS)
    if CONSTRAINED:
        known = output < STREAMS * (STREAMS + 2)
        first = projection + (output * STREAMS + stream) * width
    else:
        known = (output < STREAMS * (STREAMS + 2)) & (output % STREAMS == stream)
        first = projection + output // STREAMS * width
    return load_or_zero(first[:, None] + channel[None, :], mask_tile(known, channel < width))


# fmt: off
@cache_launches("count")
def _connect_kernel(
    streams, output, before, projection, static, scale, connected, inputs, weights, logits, rstd, count, width,
    stride, stream_stride, eps, STREAMS: tl.constexpr, OUTPUTS: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, CONSTRAINED: tl.constexpr,
):
    # fmt: on
    SIZE: tl.constexpr = STREAMS * (STREAMS + 2)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = token < count
    source, source_stride, source_stream_stride = streams, stride, stream_stride
    if output is not None:
        mixing = _load_weights(before, token, inside, SIZE)
        source, source_stride, source_stream_stride = connected, STREAMS * width, width
    products = tl.zeros((TOKENS, OUTPUTS), tl.float32)
    squares = _repeat(tl.zeros((TOKENS,), tl.float32), STREAMS)
    for first in tl.range(0, width, BLOCK, num_stages=1):  # a later stage loads what an earlier one stores
        channel = first + tl.arange(0, BLOCK)
        within = mask_tile(inside, channel < width)
        if output is not None:
            tiles = _load_streams(streams, token, channel, within, stride, stream_stride, STREAMS)
            added = load_or_zero(output + token[:, None] * width + channel[None, :], within)
            for stream in tl.static_range(STREAMS):
                place = token[:, None] * (STREAMS * width) + (stream * width + channel)[None, :]
                tl.store(connected + place, _mix_streams(tiles, added, mixing, stream, STREAMS), mask=within)
            tl.debug_barrier()  # Loaded again, because the product's layout would mix in all warps.
        if projection is not None:
            sums = ()
            tiles = _load_streams(source, token, channel, within, source_stride, source_stream_stride, STREAMS)
            for stream in tl.static_range(STREAMS):
                factors = _load_projection(projection, stream, channel, width, STREAMS, OUTPUTS, CONSTRAINED)
                tile = tiles[stream].to(factors.dtype)
                products = tl.dot(tile, tl.trans(factors), products, input_precision=PRECISION)
                sums = sums + (squares[stream] + tl.sum(tiles[stream] * tiles[stream], 1),)
            squares = sums
    if projection is not None:
        column = tl.arange(0, OUTPUTS)
        row, place = column // STREAMS, token[:, None] * SIZE + column[None, :]
        known = mask_tile(inside, column < SIZE)
        if CONSTRAINED:
            sum_of_squares = squares[0]
            for stream in tl.static_range(1, STREAMS):
                sum_of_squares += squares[stream]
            squares = _repeat(sum_of_squares / STREAMS, STREAMS)
        for stream in tl.static_range(STREAMS):
            inverse = tl.rsqrt(squares[stream] / width + eps)
            tl.store(rstd + token * STREAMS + stream, inverse, mask=inside)
            products *= tl.where(column[None, :] % STREAMS == stream, inverse[:, None], 1.0)
        tl.store(logits + place, products, mask=known)
        start = load_or_zero(static + column, column < SIZE)[None, :]
        factor = load_or_zero(scale + row, column < SIZE)[None, :]
        if CONSTRAINED:
            values = tl.sigmoid(start + factor * products) * (row + 1)[None, :]
        else:
            values = start + factor * (2.0 * tl.sigmoid(2.0 * products) - 1.0)
        tl.store(weights + place, values, mask=known)
        reading = ()
        for stream in tl.static_range(STREAMS):
            reading = reading + (tl.sum(tl.where(column[None, :] == stream, values, 0.0), 1),)
        for first in range(0, width, BLOCK):
            channel = first + tl.arange(0, BLOCK)
            within = mask_tile(inside, channel < width)
            tiles = _load_streams(source, token, channel, within, source_stride, source_stream_stride, STREAMS)
            total = reading[0][:, None] * tiles[0]
            for stream in tl.static_range(1, STREAMS):
                total += reading[stream][:, None] * tiles[stream]
            tl.store(inputs + token[:, None] * width + channel[None, :], total, mask=within)


# fmt: off
@cache_launches("count")
def _connect_backward_kernel(
    grad_connected, grad_inputs, grad_weights, streams, output, before, projection, scale, weights, logits, rstd,
    grad_streams, grad_output, grad_before, grad_products, parts, count, width, stride, stream_stride,
    STREAMS: tl.constexpr, OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr, CONSTRAINED: tl.constexpr,
):
    # fmt: on
    SIZE: tl.constexpr = STREAMS * (STREAMS + 2)
    FIRST: tl.constexpr = 0 if CONSTRAINED else 1
    STEP: tl.constexpr = 1 if CONSTRAINED else STREAMS
    PADDED: tl.constexpr = (SIZE + 7) // 8 * 8 if CONSTRAINED else (STREAMS + 9) // 8 * 8
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = token < count
    zeros = tl.zeros((TOKENS,), tl.float32)
    if output is not None:
        mixing = _load_weights(before, token, inside, SIZE)
    if projection is not None:
        along = _repeat(zeros, STREAMS)
        for first in range(0, width, BLOCK):
            channel = first + tl.arange(0, BLOCK)
            within = mask_tile(inside, channel < width)
            tiles = _load_streams(streams, token, channel, within, stride, stream_stride, STREAMS)
            place = token[:, None] * width + channel[None, :]
            grads = load_float32(grad_inputs + place, within)
            if output is not None:
                added = load_or_zero(output + place, within)
            sums = ()
            for stream in tl.static_range(STREAMS):
                tile = tiles[stream]
                if output is not None:
                    tile = _mix_streams(tiles, added, mixing, stream, STREAMS).to(tl.float32)
                sums = sums + (along[stream] + tl.sum(tile * grads, 1),)
            along = sums
        column = tl.arange(0, OUTPUTS)
        row, from_stream = column // STREAMS, column % STREAMS
        weight_place, known = token[:, None] * SIZE + column[None, :], mask_tile(inside, column < SIZE)
        weight_grads = load_or_zero(grad_weights + weight_place, known)
        for stream in tl.static_range(STREAMS):
            weight_grads += tl.where(column[None, :] == stream, along[stream][:, None], 0.0)
        products = load_or_zero(logits + weight_place, known)
        factor = load_or_zero(scale + row, column < SIZE)[None, :]
        if CONSTRAINED:
            values = load_or_zero(weights + weight_place, known)
            weight_grads *= tl.where(row[None, :] < 2, values * (1.0 - values / (row + 1)[None, :]), 1.0)
            to_scale = weight_grads * products
            grad_logits = weight_grads * factor
        else:
            dynamic = 2.0 * tl.sigmoid(2.0 * products) - 1.0
            to_scale = weight_grads * dynamic
            grad_logits = weight_grads * factor * (1.0 - dynamic * dynamic)
        programs_sums = parts + tl.program_id(0) * 2 * SIZE + column
        tl.store(programs_sums, tl.sum(weight_grads, 0), mask=column < SIZE)
        tl.store(programs_sums + SIZE, tl.sum(to_scale, 0), mask=column < SIZE)
        inverse = load_or_zero(rstd + token[:, None] * STREAMS + from_stream[None, :], known)
        if CONSTRAINED:
            padded = token[:, None] * PADDED + column[None, :]
        else:
            padded = (token[:, None] * STREAMS + from_stream[None, :]) * PADDED + row[None, :]
        tl.store(grad_products + padded, grad_logits * inverse, mask=known)
        tl.debug_barrier()
        grad_logits *= products
        reading, shrinking = _load_weights(weights, token, inside, SIZE), ()
        for stream in tl.static_range(STREAMS):
            inverse = load_or_zero(rstd + token * STREAMS + stream, inside)
            if CONSTRAINED:
                total = tl.sum(grad_logits, 1) / STREAMS
            else:
                total = tl.sum(tl.where(from_stream[None, :] == stream, grad_logits, 0.0), 1)
            shrinking = shrinking + (total * inverse * inverse / width,)
    dots = _repeat(zeros, STREAMS * (STREAMS + 1))
    for first in range(0, width, BLOCK):
        channel = first + tl.arange(0, BLOCK)
        within = mask_tile(inside, channel < width)
        tiles = _load_streams(streams, token, channel, within, stride, stream_stride, STREAMS)
        place = token[:, None] * width + channel[None, :]
        if output is not None:
            added = load_or_zero(output + place, within)
            to_output = tl.zeros((TOKENS, BLOCK), tl.float32)
            to_streams, sums = _repeat(to_output, STREAMS), ()
        if projection is not None:
            read_grads = load_float32(grad_inputs + place, within)
        for stream in tl.static_range(STREAMS):
            place_in_stream = (token[:, None] * STREAMS + stream) * width + channel[None, :]
            grads = load_float32(grad_connected + place_in_stream, within)
            if projection is not None:
                tile = tiles[stream]
                if output is not None:
                    tile = _mix_streams(tiles, added, mixing, stream, STREAMS).to(tl.float32)
                grads += reading[stream][:, None] * read_grads - shrinking[stream][:, None] * tile
                # No tl.dot, because its layout would spread to everything here, and rows to several warps.
                for number in tl.range(FIRST * stream, SIZE, STEP, loop_unroll_factor=2):
                    if CONSTRAINED:
                        products_place, projection_row = token * PADDED + number, number * STREAMS + stream
                    else:
                        projection_row = number // STREAMS
                        products_place = (token * STREAMS + stream) * PADDED + projection_row
                    factors = load_float32(projection + projection_row * width + channel, channel < width)
                    grads += load_float32(grad_products + products_place, inside)[:, None] * factors[None, :]
            if output is None:
                tl.store(grad_streams + place_in_stream, grads, mask=within)
            else:
                to_output += mixing[STREAMS + stream][:, None] * grads
                sums = sums + (dots[stream * (STREAMS + 1)] + tl.sum(grads * added.to(tl.float32), 1),)
                summed = ()
                for other in tl.static_range(STREAMS):
                    weight = mixing[(2 + stream) * STREAMS + other][:, None]
                    summed = summed + (to_streams[other] + weight * grads,)
                    dot = dots[stream * (STREAMS + 1) + 1 + other] + tl.sum(grads * tiles[other], 1)
                    sums = sums + (dot,)
                to_streams = summed
        if output is not None:
            dots = sums
            tl.store(grad_output + place, to_output, mask=within)
            for stream in tl.static_range(STREAMS):
                place_in_stream = (token[:, None] * STREAMS + stream) * width + channel[None, :]
                tl.store(grad_streams + place_in_stream, to_streams[stream], mask=within)
    if output is not None:
        for stream in tl.static_range(STREAMS):
            first_weight = grad_before + token * SIZE + stream
            tl.store(first_weight, zeros, mask=inside)
            tl.store(first_weight + STREAMS, dots[stream * (STREAMS + 1)], mask=inside)
            for other in tl.static_range(STREAMS):
                dot = dots[stream * (STREAMS + 1) + 1 + other]
                tl.store(grad_before + token * SIZE + (2 + stream) * STREAMS + other, dot, mask=inside)


@triton.jit
def _log_softmax(logs, valid, DIMENSION: tl.constexpr):
    """Return normalized logarithms, very small outside of the streams."""
    largest = tl.max(logs, DIMENSION, keep_dims=True)
    total = tl.sum(tl.exp(logs - largest), DIMENSION, keep_dims=True)
    return tl.where(valid, logs - largest - tl.log(total), -1e30)


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
    known = between & (token < count)
    column = (2 + to_stream) * STREAMS + from_stream
    place = token * ((STREAMS + 2) * STREAMS) + column
    products = load_or_zero(logits + place, known)
    start, factor = load_or_zero(static + column, between), load_or_zero(scale + 2 + to_stream, to_stream < STREAMS)
    logs = tl.where(between, start + factor * products, -1e30)
    rounds = ()
    for _ in tl.static_range(ROUNDS):
        columns = _log_softmax(logs, between, 1)
        logs = _log_softmax(columns, between, 2)
        rounds = rounds + (columns, logs)
    values = tl.exp(logs)
    if BACKWARD:
        values *= load_or_zero(weights + place, known)
        for step in tl.static_range(2 * ROUNDS):
            total = tl.sum(values, 2 - step % 2, keep_dims=True)
            values -= tl.exp(rounds[2 * ROUNDS - 1 - step]) * total
    tl.store(weights + place, values, mask=known)
