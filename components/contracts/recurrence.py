"""Contracts for the port of recurrent layers' operations."""

import torch
from torch import Tensor

from drawloom.components.contracts.model import _expect_close, _random_tensor
from drawloom.components.ports.cache import KeyValueCache
from drawloom.components.ports.recurrence import RecurrentKernels

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1], [4, 4, 4, 4, 4, 2]])


def _make_recurrence_inputs() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v = _random_tensor(2, 6, 2, 8), _random_tensor(2, 6, 2, 8) / 3, _random_tensor(2, 6, 4, 5)
    return q, k, v, -_random_tensor(2, 6, 4).abs(), _random_tensor(2, 6, 4).sigmoid()


def convolution_is_causal_within_documents(kernels: RecurrentKernels) -> None:
    """The result is SiLU of the weighted sum over a token and earlier tokens in its document."""
    x, weight = _random_tensor(2, 6, 3), _random_tensor(3, 4)
    wanted = x.double() * weight[:, 3].double()
    for lag in (1, 2, 3):
        is_same = (DOCUMENTS[:, lag:] == DOCUMENTS[:, :-lag])[..., None]
        wanted[:, lag:] += (x[:, :-lag] * weight[:, 3 - lag] * is_same).double()
    _expect_close(kernels.causal_conv(x, weight, kernels.recurrence_mask(DOCUMENTS)), wanted * wanted.sigmoid())


def states_follow_the_gated_delta_rule(kernels: RecurrentKernels) -> None:
    """The result is that of a loop over the tokens of each document, in which two value heads share a key head."""
    q, k, v, g, beta = (x.double() for x in _make_recurrence_inputs())
    wanted = torch.zeros_like(v)
    for row, head in ((row, head) for row in range(2) for head in range(4)):
        state = torch.zeros(8, 5, dtype=torch.float64)
        for token in range(6):
            if token and DOCUMENTS[row, token] != DOCUMENTS[row, token - 1]:
                state = torch.zeros_like(state)
            key, decayed = k[row, token, head // 2], g[row, token, head].exp() * state
            state = decayed + beta[row, token, head] * torch.outer(key, v[row, token, head] - decayed.T @ key)
            wanted[row, token, head] = state.T @ q[row, token, head // 2]
    q, k, v, g, beta = _make_recurrence_inputs()
    _expect_close(kernels.gated_delta_rule(q, k, v, g, beta, kernels.recurrence_mask(DOCUMENTS)), wanted)


def results_for_cached_parts_equal_the_whole_texts(kernels: RecurrentKernels) -> None:
    """Both operations on parts of a text, with a cache of states, equal the results for the whole text."""
    (q, k, v, g, beta), x, weight = _make_recurrence_inputs(), _random_tensor(2, 6, 3), _random_tensor(3, 4)
    documents, cache = torch.zeros(2, 6, dtype=torch.int64), KeyValueCache(6)
    mask = kernels.recurrence_mask(documents)
    mixed, convolved = kernels.gated_delta_rule(q, k, v, g, beta, mask), kernels.causal_conv(x, weight, mask)
    for part in (slice(0, 1), slice(1, 4), slice(4, 6)):
        mask = kernels.recurrence_mask(documents[:, part], cache=cache)
        _expect_close(kernels.causal_conv(x[:, part], weight, mask), convolved[:, part].double())
        actual = kernels.gated_delta_rule(q[:, part], k[:, part], v[:, part], g[:, part], beta[:, part], mask)
        _expect_close(actual, mixed[:, part].double())
        cache.end_pass(part.stop - part.start)
