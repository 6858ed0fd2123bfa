"""Texts with a common beginning, computed once by a learning pass."""

from collections.abc import Iterator
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from drawloom import NodeView, Problem
from drawloom.components.ports.data import TokenBatch
from drawloom.components.ports.model import build_meta_module_if_known
from drawloom.components.state.batch import leaf


class SharedPairs(TokenBatch):
    """
    Rows of pairs, without a rejected document's tokens shared with the chosen one.

    Its positions continue behind them. `reader_ids`, int64 (rows, length), are the document ids for attention, as
    `kernels.attention = "tree"` reads them. `shared_counts`, int64 (rows,), are the missing tokens, included in
    `token_count`.
    """

    reader_ids: Tensor = leaf("tokens", default=None, kw_only=True)
    shared_counts: Tensor = leaf("rows", default=None, kw_only=True)

    @property
    def visible_keys(self) -> Tensor:
        return self.positions + 1

    def with_zero_weights(self) -> Self:
        return super().with_zero_weights().evolve(shared_counts=torch.zeros_like(self.shared_counts))

    @property
    def token_count(self) -> int:
        return super().token_count + int(self.shared_counts.sum())


@runtime_checkable
class MayBeRecurrent(Protocol):
    """A module with or without recurrent layers, whose states can't branch."""

    is_recurrent: bool


@runtime_checkable
class MayBalanceRows(Protocol):
    """A router with a coefficient for a loss that counts a row's tokens."""

    aux_loss_coef: float


def find_sharing_problems(node: NodeView, model: NodeView) -> Iterator[Problem]:
    """Yield problems with kernels and models if texts of `node` can't share a beginning there."""
    kernels = model.neighbour("kernels")
    if kernels and kernels.settings.get("attention") != "tree":
        text = f"texts would not see their common beginning in [{node.name}]"
        yield kernels.problem("attention", text, 'write use = "kernels.auto" and attention = "tree"')
    module = build_meta_module_if_known(model)
    parts = [] if module is None else [*module.modules()]
    if any(isinstance(part, MayBeRecurrent) and part.is_recurrent for part in parts):
        text = f"[{model.name}] has recurrent layers, whose states can't continue in several texts"
        yield node.problem("use", text, f"remove [{node.name}], or use a model with attention alone")
    if any(isinstance(part, MayBalanceRows) and part.aux_loss_coef for part in parts):
        text = "the load-balancing loss of a row counts its tokens, and a shared beginning would count once"
        yield model.problem("router_aux_loss_coef", text, "write router_aux_loss_coef = 0.0")
