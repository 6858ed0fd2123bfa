"""
Tensor parallelism: ranks that share every matrix product, with tokens split over them in between.

Linear layers are split as in Shoeybi et al. 2019, "Megatron-LM", arXiv 1909.08053, section 3: those before a
nonlinearity by rows of their weights (colwise), those after it by columns (rowwise). Norms and residuals are computed
by each rank for its own tokens (Korthikanti et al. 2022, "Reducing Activation Recomputation", arXiv 2205.05198, section
4.2.2, "sequence parallelism"), so that the collectives are an all-gather before and a reduce-scatter behind.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor, nn
from torch.autograd import Function

from drawloom.components.distributed.process_group import SingleProcess
from drawloom.components.parallel.dimension import Dimension, SharedParameters, StageNodes
from drawloom.components.parallel.meta_collectives import collective
from drawloom.components.parallel.parameter_split import SplitDim, split_parameter
from drawloom.components.ports.distributed import Group
from drawloom.components.ports.model import TensorParallelModel, VocabularyPart
from drawloom.components.ports.slices import RankSlice, gather_shares, rank_shares
from drawloom.graph import Problem

Collective = Callable[[Tensor, Group], Tensor]


@attrs.frozen(eq=False)
class TensorRanks:
    """
    The ranks that share matrix products, and what they exchange; alone, every method returns its argument.

    "Split tokens" are (tokens / size, width), this rank's part of the tokens of all rows one after the other; the last
    rank's are padded where the number of tokens does not divide.
    """

    group: Group
    size: int = attrs.field(init=False, default=attrs.Factory(lambda self: self.group.size, takes_self=True))

    def gather_tokens(self, hidden: Tensor, shape: Sequence[int] | None = None) -> Tensor:
        """
        Split tokens to those of all ranks: (*shape, width), or without a shape (tokens, width) with what was padded.

        Each rank computes something else with them: the backward pass sums over the ranks.
        """
        if self.size == 1:
            return hidden
        gathered = _exchange(hidden, self.group, _gather, _reduce_scatter)
        return gathered if shape is None else _unpadded(gathered, shape)

    def gather_tokens_for_all(self, hidden: Tensor, shape: Sequence[int]) -> Tensor:
        """
        Split tokens to those of all ranks, (*shape, width), with which all ranks compute the same.

        Each rank has the whole gradient then, and the backward pass takes its part.
        """
        if self.size == 1:
            return hidden
        return _unpadded(_exchange(hidden, self.group, _gather, _own), shape)

    def reduce_scatter_tokens(self, partial: Tensor) -> Tensor:
        """The sum over the ranks of (..., width), as split tokens."""
        if self.size == 1:
            return partial
        tokens = partial.flatten(0, -2)
        padding = -len(tokens) % self.size
        if padding:
            tokens = nn.functional.pad(tokens, (0, 0, 0, padding))
        return _exchange(tokens, self.group, _reduce_scatter, _gather)

    def copy(self, tensor: Tensor) -> Tensor:
        """A tensor (any shape) with which each rank computes something else: the backward pass sums over the ranks."""
        return tensor if self.size == 1 else _exchange(tensor, self.group, _same, _sum)

    def sum(self, partial: Tensor) -> Tensor:
        """The sum over the ranks of a tensor of any shape, with which all ranks compute the same."""
        return partial if self.size == 1 else _exchange(partial, self.group, _sum, _same)

    def share(self, length: int) -> range:
        """Which of `length` elements this rank has, where each has its share."""
        return rank_shares(length, self.size)[self.group.rank]

    def gather_last(self, share: Tensor, length: int) -> Tensor:
        """The last dimension (..., length), of which each rank has a share, with which all ranks compute the same."""
        if self.size == 1:
            return share
        return _exchange(share, self.group, partial(_gather_last, length=length), _own_last)

    def rows_of(self, tokens: Tensor, vocab_size: int) -> tuple[Tensor, Tensor | None]:
        """
        Which rows of this rank's share of a table (vocab_size, width) the tokens' are, and a mask (..., 1) of those it
        has.

        tokens: int64 (...); the rows have their shape, and are 0 where another rank has the token's. Alone there is no
        mask.
        """
        if self.size == 1:
            return tokens, None
        mine = self.share(vocab_size)
        local = tokens - mine.start
        here = (local >= 0) & (local < len(mine))
        return local.where(here, 0), here.unsqueeze(-1)

    def vocabulary_part(self, vocab_size: int) -> VocabularyPart | None:
        """The part of the vocabulary that this rank's share of the output weight is."""
        return None if self.size == 1 else VocabularyPart(self.share(vocab_size).start, self.group)


ALONE = TensorRanks(SingleProcess())
"""One rank, which computes everything."""


class TensorParallel(nn.Module):
    """
    A module that can share its work with `ranks`; until `split` sets them it is alone.

    Its own parameters that `split_dims` does not name are whole on each rank, and get gradients of a part of the tokens
    or channels there, which are summed over the ranks.
    """

    ranks: TensorRanks = ALONE

    def split_dims(self) -> Mapping[str, SplitDim]:
        """The parameters that are split, by name."""
        return {}


def split(module: nn.Module, ranks: TensorRanks) -> dict[str, RankSlice]:
    """
    Split the modules of a model on the meta device over ranks; gives the slices of what is split, by name.

    Raises UserError for a parameter that can't be split so.
    """
    splits: dict[str, RankSlice] = {}
    for path, part in module.named_modules():
        if ranks.size > 1 and isinstance(part, TensorParallel):
            part.ranks = ranks
            for leaf, how in part.split_dims().items():
                name = f"{path}.{leaf}" if path else leaf
                splits[name] = split_parameter(module, name, ranks.group, TensorDimension.name, how)
    return splits


@attrs.define(eq=False)
class TensorDimension(Dimension):
    """Ranks that share every matrix product; what they hold whole gets the gradients of a part of the tokens."""

    name: ClassVar[str] = "tensor"
    splits_work: ClassVar[bool] = True
    can_capture: ClassVar[bool] = False

    @classmethod
    def check(cls, nodes: StageNodes) -> Iterator[Problem]:
        """Yield problems of models that the ranks can't share evenly."""
        ranks, model = nodes.sizes.tensor, nodes.model
        if ranks == 1 or model is None or not issubclass(model.component, TensorParallelModel):
            return
        for fault in model.component.tensor_faults(model, ranks):
            text = f"{ranks} ranks along 'tensor' share every matrix product of [{model.name}], and {fault}"
            yield nodes.mesh.problem(cls.name, text, "write another number, or 1")

    @classmethod
    def notes(cls, nodes: StageNodes) -> Iterator[str]:
        if (ranks := nodes.sizes.tensor) > 1:
            yield f"linear layers, embedding and head: split over {ranks} ranks, and tokens in between"

    def split(self, module: nn.Module) -> dict[str, RankSlice]:
        return split(module, TensorRanks(self.mesh.tensor_group))

    def owned_elsewhere(self, parameters: SharedParameters) -> Set[str]:
        return parameters.trained.keys() - parameters.split if self.mesh.indices.tensor else frozenset()

    def sum_gradients(self, parameters: SharedParameters) -> None:
        """Sum the gradients of parameters that are whole on each rank, such as norms': each has its own tokens'."""
        whole = [name for name in parameters.trained if name in parameters.of_model and name not in parameters.split]
        parameters.sum_named(whole, self.mesh.tensor_group)


def _unpadded(tokens: Tensor, shape: Sequence[int]) -> Tensor:
    """The tokens (at least as many as `shape` has, width) as (*shape, width)."""
    return tokens[: torch.Size(shape).numel()].view(*shape, -1)


class _Exchange(Function):
    """What `there` makes of a tensor and a group; the backward pass is `back` of the gradient and the group."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, there: Collective, back: Collective) -> Tensor:
        """What `there` makes of a tensor of any shape and dtype, in that dtype."""
        ctx.group, ctx.back = group, back
        return there(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grad, ctx.group), None, None, None


def _exchange(tensor: Tensor, group: Group, there: Collective, back: Collective) -> Tensor:
    exchanged: Tensor = _Exchange.apply(tensor, group, there, back)  # type: ignore[no-untyped-call]
    return exchanged


def _same(tensor: Tensor, group: Group) -> Tensor:
    return tensor.view_as(tensor)  # a Function must not return its input itself


def _gather(part: Tensor, group: Group) -> Tensor:
    """(n, ...) of each rank as (size * n, ...)."""
    if part.is_meta:
        return collective(
            part, (group.size * part.shape[0], *part.shape[1:]), "all_gather", TensorDimension.name, group.size
        )
    return group.gather(part).flatten(0, 1)


def _reduce_scatter(whole: Tensor, group: Group) -> Tensor:
    """The sum over the ranks of (size * n, ...), of which each gets (n, ...)."""
    parts = whole.view(group.size, -1, *whole.shape[1:])
    if whole.is_meta:
        return collective(whole, parts.shape[1:], "reduce_scatter", TensorDimension.name, group.size)
    return group.reduce_scatter(parts)


def _sum(partial: Tensor, group: Group) -> Tensor:
    if partial.is_meta:
        return collective(partial, partial.shape, "all_reduce", TensorDimension.name, group.size)
    total = partial.detach().clone(memory_format=torch.contiguous_format)
    group.sum(total)
    return total


def _gather_last(share: Tensor, group: Group, length: int) -> Tensor:
    if share.is_meta:
        return collective(share, (*share.shape[:-1], length), "all_gather", TensorDimension.name, group.size)
    return gather_shares(share, group, share.ndim - 1, length)


def _own(whole: Tensor, group: Group) -> Tensor:
    return whole.chunk(group.size)[group.rank].contiguous()


def _own_last(whole: Tensor, group: Group) -> Tensor:
    mine = rank_shares(whole.shape[-1], group.size)[group.rank]
    return whole[..., mine.start : mine.stop].contiguous()
