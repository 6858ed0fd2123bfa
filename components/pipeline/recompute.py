"""Which activations of a stage the backward pass computes again: a policy that is handed to each forward pass."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from functools import partial
from typing import Any

import torch
from torch import nn

from drawloom.components.ports.stages import Recompute
from drawloom.kernels.recompute import Selective, rerun

_every: ContextVar[int] = ContextVar("every", default=0)
"""Of how many blocks one is recomputed, in the forward pass of this thread; 0 for none."""


def fault_of_policy(policy: Recompute) -> str | None:
    """What is wrong with a policy, if it is a number."""
    return f"{policy} is not above 0" if isinstance(policy, int) and policy < 1 else None


def notes_of_policy(policy: Recompute) -> Iterator[str]:
    """What a policy keeps of a microbatch, and what it costs."""
    if policy == "selective":
        yield "recompute: norms, gates and rotations run again in the backward pass; their results are not kept"
    elif policy != "none":
        which = "each block" if policy in ("blocks", 1) else f"one of {policy} blocks"
        yield f"recompute: of {which} only the input is kept, and its forward runs again in the backward pass"


def make_recomputable(blocks: Sequence[nn.Module]) -> None:
    """Let the forward passes of a stage's blocks follow the policy that `recomputing` sets."""
    for number, block in enumerate(blocks):
        # The block's own forward, and not its call: hooks, such as those that gather its parameters, run once.
        block.forward = partial(_forward, number, block.forward)


def _forward(number: int, forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    every = _every.get()
    if not every or number % every or not torch.is_grad_enabled():
        return forward(*arguments, **named)
    return rerun(forward, *arguments, **named)


def recomputing(policy: Recompute) -> AbstractContextManager[Any]:
    """A context manager for a stage's forward pass."""
    if policy == "none":
        return nullcontext()
    return Selective() if policy == "selective" else _Blocks(1 if policy == "blocks" else policy)


class _Blocks:
    """A context in which the first of every `count` blocks is recomputed."""

    __slots__ = ("_count", "_token")

    def __init__(self, count: int) -> None:
        self._count = count

    def __enter__(self) -> None:
        self._token: Token[int] = _every.set(self._count)

    def __exit__(self, *_: object) -> None:
        _every.reset(self._token)
