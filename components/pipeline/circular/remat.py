"""
What a stage keeps for its backward pass, and what it computes again: one policy for every run of a stage.

A circular pipeline holds what all iterations keep until its backward pass begins, so the policy settles how many
microbatches fit into memory. MaxText keeps the inputs of iterations and of layers by name and recomputes the rest.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Remat = Literal["nothing", "everything", "all_but_products"]
"""What is computed again: nothing; everything, from a stage's inputs; everything but matrix products."""


def check_remat(remat: str) -> Remat:
    """The policy of this name; ValueError if there is none."""
    for known in get_args(Remat):
        if remat == known:
            return known  # type: ignore[no-any-return]
    raise ValueError(f"nothing is known of remat={remat!r}; write one of {', '.join(map(repr, get_args(Remat)))}")


_aten = torch.ops.aten
_PRODUCTS = (_aten.mm, _aten.bmm, _aten.addmm, _aten.baddbmm, _aten._grouped_mm)


def with_remat(remat: Remat, work: Callable[..., Any], *arguments: Any) -> Any:
    """What `work` gives, kept for its backward pass as the policy says. Random numbers come out alike again."""
    if remat == "nothing" or not torch.is_grad_enabled():
        return work(*arguments)
    if remat == "everything":
        return checkpoint(work, *arguments, use_reentrant=False)
    contexts = partial(create_selective_checkpoint_contexts, _keep_products)
    return checkpoint(work, *arguments, use_reentrant=False, context_fn=contexts)


def _keep_products(_context: Any, operation: Any, *_arguments: Any, **_options: Any) -> CheckpointPolicy:
    kept = getattr(operation, "overloadpacket", operation) in _PRODUCTS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
