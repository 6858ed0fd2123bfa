"""
Hyper-connections (arXiv 2409.19606), also manifold-constrained ones (mHC, arXiv 2512.24880), between branches.

One operation ends a branch's connection and begins the next branch's, so that streams pass through memory once.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from drawloom.kernels.operation import upcast

ROUNDS = 20
"""Row and column normalizations, as in mHC."""


Connection = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float, int, bool]
"""
A branch's connection to n streams: projection, weights to read (n,), write (n,) and mix (n, n), scales, eps, `first`,
and `constrained`.

Weights are differences from initial ones, which read stream `first`. Normed streams are multiplied by the projection:
each one by (n + 2, width), or if constrained all together by (n * (n + 2), n * width). Rows are for weights to read, to
write, and to mix into stream 0, 1, ...; their scales are (2,) for reads and mixes, and for writes, or (3,).
"""


class ConnectedStreams(NamedTuple):
    """
    Streams (..., n, width), and the next branch's input (..., width) and weights (..., n + 2, n).

    Weights in row 0 read streams, in row 1 write to them, and in others mix them into stream 0, 1, ...
    """

    streams: Tensor
    inputs: Tensor
    weights: Tensor


def connect_streams_eager(
    streams: Tensor, output: Tensor | None, before: Tensor | None, connection: Connection | None
) -> ConnectedStreams:
    """
    Write a branch's output (..., width) to streams (..., n, width), and read the next branch's input.

    `before` are the branch's weights (..., n + 2, n), at least float32; `connection` is the next branch's, None at a
    layer's end. Elsewhere streams, rounded to the inputs' dtype, have at least float32, since gradients are summed so.
    """
    dtype, wide = streams.dtype, upcast(streams)
    if output is not None and before is not None:
        dtype = output.dtype
        wide = upcast((before[..., 2:, :] @ wide + before[..., 1, :, None] * output.unsqueeze(-2)).to(dtype))
    if connection is None:
        return ConnectedStreams(wide.to(dtype), wide.new_empty(0), wide.new_empty(0))
    weights = _compute_weights(wide, connection)
    return ConnectedStreams(wide, (weights[..., :1, :] @ wide).squeeze(-2).to(dtype), weights)


def _compute_weights(streams: Tensor, connection: Connection) -> Tensor:
    projection, *parameters, eps, first, constrained = connection
    read, write, mix, scale = (parameter.to(streams.dtype) for parameter in parameters)
    count, eye = len(read), torch.eye(len(read), dtype=streams.dtype, device=streams.device)
    if constrained:
        static = torch.stack([torch.logit(0.8 * eye[first] + 0.2 / count) + read, write, *(8.0 * eye + mix)])
    else:
        static = torch.stack([eye[first] + read, 1.0 + write, *(eye + mix).T])
    scales = torch.cat([scale[:2], scale[2 * constrained].expand(count)])[:, None]
    rows = streams.flatten(-2) if constrained else streams
    factors = (rows.square().mean(-1, keepdim=True) + eps).rsqrt()
    products = (rows @ projection.to(rows.dtype).T) * factors
    if not constrained:
        return static + scales * products.mT.tanh()
    logits = static + scales * torch.unflatten(products, -1, static.shape)
    mixes = logits[..., 2:, :]
    for _ in range(ROUNDS):
        mixes = mixes.log_softmax(-2).log_softmax(-1)
    reads, writes = logits[..., :2, :].sigmoid().unbind(-2)
    return torch.cat([torch.stack([reads, 2.0 * writes], -2), mixes.exp()], -2)
