"""Activation checkpointing: the policy for recomputed activations in a stage's backward pass."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from functools import partial
from typing import Any

import torch
from torch import nn

_every: ContextVar[int] = ContextVar("every", default=0)
"""Recompute one block of every so many in this thread's forward pass; 0 recomputes none."""


def make_recomputable(blocks: Sequence[nn.Module]) -> None:
    """Let a stage's blocks follow `apply_recompute_policy`'s policy in their forward passes, if they do not yet."""
    for number, block in enumerate(blocks):
        if isinstance(block.forward, partial) and block.forward.func is _forward_block_recomputing_every_nth:
            continue
        # This replaces `forward`, not `__call__`, so that hooks, such as FSDP's gathering of parameters, run once.
        block.forward = partial(_forward_block_recomputing_every_nth, number, block.forward)


def _forward_block_recomputing_every_nth(
    number: int, forward: Callable[..., Any], *arguments: Any, **named: Any
) -> Any:
    every = _every.get()
    if not every or number % every or not torch.is_grad_enabled():
        return forward(*arguments, **named)
    from drawloom.kernels.recompute.repeated_calls import call_with_recomputation

    return call_with_recomputation(forward, *arguments, **named)


def apply_recompute_policy(policy: int | str, blocks: Sequence[nn.Module] = ()) -> AbstractContextManager[Any]:
    """
    Return a context manager for a stage's forward pass: 'none', 'selective', 'quantized', 'blocks', or n for one of n
    `blocks`; from then on they follow policies.
    """
    if policy == "none":
        return nullcontext()
    if policy in ("selective", "quantized"):
        from drawloom.kernels.recompute.selective import Quantized, Selective

        return Selective() if policy == "selective" else Quantized()
    make_recomputable(blocks)
    return _Blocks(policy if isinstance(policy, int) else 1)


class _Blocks:
    """Context to recompute the first of every `count` blocks."""

    __slots__ = ("_count", "_token")

    def __init__(self, count: int) -> None:
        self._count = count

    def __enter__(self) -> None:
        self._token: Token[int] = _every.set(self._count)

    def __exit__(self, *_: object) -> None:
        _every.reset(self._token)
