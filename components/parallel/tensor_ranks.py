"""
Tensor parallelism: ranks share every matrix product, with tokens split over the ranks between products.

Linear layers are split as in Shoeybi et al. 2019, "Megatron-LM", arXiv 1909.08053, section 3: layers before a
nonlinearity by rows of their weights (colwise), layers after it by columns (rowwise). A rank computes norms and
residuals for its own tokens (Korthikanti et al. 2022, "Reducing Activation Recomputation", arXiv 2205.05198, section
4.2.2, "sequence parallelism"), so the collectives are an all-gather before a pair of layers and a reduce-scatter after
it.

A slice of a split parameter is an ordinary parameter of its module.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.autograd import Function

from drawloom import UserError, internal
from drawloom.components.distributed.single_process import SingleProcess
from drawloom.components.parallel.meta_collectives import emulate_collective
from drawloom.ports import Group, RankSlice, TensorSlice, VocabularyPart, divide_into_shares, gather_shares


@attrs.frozen
class SplitDim:
    """
    A parameter's split dimension, in units of `unit` consecutive elements.

    With `uneven`, the unit count need not be divisible by the rank count: the first ranks get one unit more.
    """

    dim: int
    unit: int = 1
    uneven: bool = False


def replace_by_rank_slice(
    module: nn.Module, name: str, group: Group, mesh_dimension: str, split_dim: SplitDim
) -> RankSlice:
    """
    Replace a parameter on the meta device by this rank's slice.

    Raises UserError if the ranks along the mesh dimension `mesh_dimension` can't share the parameter like this.
    """
    owner, _, leaf = name.rpartition(".")
    whole = module.get_parameter(name)
    tensor_slice = _compute_rank_slice(name, tuple(whole.shape), split_dim, group, mesh_dimension)
    local = torch.empty(tensor_slice.size, dtype=whole.dtype, device=whole.device)
    setattr(module.get_submodule(owner), leaf, nn.Parameter(local, whole.requires_grad))
    return RankSlice(tensor_slice, group)


def _compute_rank_slice(
    name: str, shape: tuple[int, ...], split_dim: SplitDim, group: Group, mesh_dimension: str
) -> TensorSlice:
    """
    Return this rank's slice along the split dimension.

    Raises UserError if the rank count doesn't divide the unit count or, with `uneven`, exceeds it.
    """
    dim, unit = split_dim.dim, split_dim.unit
    units = shape[dim] // unit
    if units < group.size if split_dim.uneven else units % group.size:
        part = f"{units} heads of {unit} channels" if unit > 1 else f"dimension {dim} of size {units}"
        fault, remedy = ("", f"at most {units}") if split_dim.uneven else (" evenly", f"a divisor of {units}")
        raise UserError(
            f"mesh.{mesh_dimension} = {group.size} ranks can't partition {part} of {name}{fault}; write {remedy}",
            exit_code=2,
        )
    local_units = divide_into_shares(units, group.size)[group.rank]
    offsets = [0] * len(shape)
    offsets[dim] = local_units.start * unit
    return TensorSlice(shape, tuple(offsets), (*shape[:dim], len(local_units) * unit, *shape[dim + 1 :]))


Collective = Callable[[Tensor, Group], Tensor]


@attrs.frozen(eq=False)
class TensorRanks:
    """
    Ranks with shared matrix products, and their collectives; with one rank, every method returns its argument.

    "Split tokens" are (tokens / size, width), this rank's part of all rows' tokens in order. The last rank's tokens are
    padded if their number is not divisible.
    """

    group: Group
    size: int = internal(attrs.Factory(lambda self: self.group.size, takes_self=True))

    def gather_tokens(self, hidden: Tensor, shape: Sequence[int] | None = None) -> Tensor:
        """
        Gather all ranks' split tokens: (*shape, width), or without a shape (tokens, width) including padding.

        Every rank computes something different with the tokens, so the backward pass sums gradients over the ranks.
        """
        if self.size == 1:
            return hidden
        gathered = _apply_collective(hidden, self.group, _gather_first_dimension, _reduce_scatter)
        return gathered if shape is None else unpad_tokens(gathered, shape)

    def gather_tokens_without_grad_sum(self, hidden: Tensor, shape: Sequence[int]) -> Tensor:
        """
        Gather all ranks' split tokens, (*shape, width), for the same computation on all ranks.

        Every rank then has the whole gradient, so the backward pass selects this rank's part.
        """
        if self.size == 1:
            return hidden
        return unpad_tokens(_apply_collective(hidden, self.group, _gather_first_dimension, _select_share), shape)

    def reduce_scatter_tokens(self, partial: Tensor) -> Tensor:
        """Sum (..., width) over the ranks and return the sum as split tokens."""
        if self.size == 1:
            return partial
        tokens = partial.flatten(0, -2)
        padding = -len(tokens) % self.size
        if padding:
            tokens = nn.functional.pad(tokens, (0, 0, 0, padding))
        return _apply_collective(tokens, self.group, _reduce_scatter, _gather_first_dimension)

    def copy_to_ranks(self, tensor: Tensor) -> Tensor:
        """
        Return the tensor itself (any shape), for different computations by rank; the backward pass sums gradients over
        the ranks.
        """
        return (
            tensor
            if self.size == 1
            else _apply_collective(tensor, self.group, _view_without_communication, _all_reduce)
        )

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Sum a tensor (any shape) over the ranks, for the same computation on all ranks."""
        return (
            partial
            if self.size == 1
            else _apply_collective(partial, self.group, _all_reduce, _view_without_communication)
        )

    def get_share(self, length: int) -> range:
        """Return this rank's share among `length` elements."""
        return divide_into_shares(length, self.size)[self.group.rank]

    def gather_last_dimension(self, share: Tensor, length: int) -> Tensor:
        """Gather the last dimension's shares, (..., length), for the same computation on all ranks."""
        if self.size == 1:
            return share
        return _apply_collective(
            share, self.group, partial(_gather_shares_of_last_dimension, length=length), _select_share_of_last_dimension
        )

    def find_local_rows_and_mask(self, tokens: Tensor, vocab_size: int) -> tuple[Tensor, Tensor | None]:
        """
        Return the tokens' row numbers in this rank's share of a table (vocab_size, width), and a mask (..., 1) of its
        tokens.

        tokens: int64 (...); row numbers have the same shape, and are 0 for other ranks' tokens. With one rank the mask
        is None.
        """
        if self.size == 1:
            return tokens, None
        share = self.get_share(vocab_size)
        local = tokens - share.start
        is_local = (local >= 0) & (local < len(share))
        return local.where(is_local, 0), is_local.unsqueeze(-1)

    def get_vocabulary_part(self, vocab_size: int) -> VocabularyPart | None:
        """Return which vocabulary entries this rank's share of the output weight has; None with one rank."""
        return None if self.size == 1 else VocabularyPart(self.get_share(vocab_size).start, self.group)


ALONE = TensorRanks(SingleProcess())
"""A single rank, which computes everything."""


class TensorParallel(nn.Module):
    """
    A module with its work divided among `ranks` after `split_over_ranks` has set them.

    Its own parameters outside `split_dims` are whole on every rank. A rank has gradients for a part of the tokens or
    channels; they are summed over the ranks.
    """

    ranks: TensorRanks = ALONE

    def split_dims(self) -> Mapping[str, SplitDim]:
        """Return the split parameters' dimensions by name."""
        return {}


def split_over_ranks(module: nn.Module, ranks: TensorRanks) -> dict[str, RankSlice]:
    """
    Split a meta model's modules over ranks, and return the slices by parameter name.

    Raises UserError for a parameter without such a split.
    """
    splits: dict[str, RankSlice] = {}
    for path, submodule in module.named_modules():
        if ranks.size > 1 and isinstance(submodule, TensorParallel):
            submodule.ranks = ranks
            for leaf, split_dim in submodule.split_dims().items():
                name = f"{path}.{leaf}" if path else leaf
                splits[name] = replace_by_rank_slice(module, name, ranks.group, "tensor", split_dim)
    return splits


def unpad_tokens(tokens: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the tokens (at least as many as `shape` has, width) as (*shape, width)."""
    return tokens[: torch.Size(shape).numel()].view(*shape, -1)


class _Exchange(Function):
    """
    A function on a tensor and a group: `operation` in the forward pass, `gradient_operation` in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, group: Group, operation: Collective, gradient_operation: Collective
    ) -> Tensor:
        """Apply `operation` to a tensor (any shape and dtype); the result has the same dtype."""
        ctx.group, ctx.gradient_operation = group, gradient_operation
        return operation(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.gradient_operation(grad, ctx.group), None, None, None


def _apply_collective(tensor: Tensor, group: Group, operation: Collective, gradient_operation: Collective) -> Tensor:
    """Apply a collective to a tensor (any shape); the backward pass applies `gradient_operation` to its gradient."""
    result: Tensor = _Exchange.apply(tensor, group, operation, gradient_operation)  # type: ignore[no-untyped-call]
    return result


def _view_without_communication(tensor: Tensor, group: Group) -> Tensor:
    """Return a view on the whole tensor (any shape): the identity as a collective."""
    return tensor.view_as(tensor)  # a Function must not return its input itself


def _gather_first_dimension(part: Tensor, group: Group) -> Tensor:
    """Gather (n, ...) from all ranks: (size * n, ...)."""
    if part.is_meta:
        return emulate_collective(
            part, (group.size * part.shape[0], *part.shape[1:]), "all_gather", "tensor", group.size
        )
    return group.gather(part).flatten(0, 1)


def _reduce_scatter(whole: Tensor, group: Group) -> Tensor:
    """Sum (size * n, ...) over the ranks and return this rank's (n, ...)."""
    parts = whole.view(group.size, -1, *whole.shape[1:])
    if whole.is_meta:
        return emulate_collective(whole, parts.shape[1:], "reduce_scatter", "tensor", group.size)
    return group.reduce_scatter(parts)


def _all_reduce(partial: Tensor, group: Group) -> Tensor:
    """Return the sum over ranks in a new tensor (any shape)."""
    if partial.is_meta:
        return emulate_collective(partial, partial.shape, "all_reduce", "tensor", group.size)
    total = partial.detach().clone(memory_format=torch.contiguous_format)
    group.sum(total)
    return total


def _gather_shares_of_last_dimension(share: Tensor, group: Group, length: int) -> Tensor:
    """Gather the last dimension's shares from all ranks: (..., length)."""
    if share.is_meta:
        return emulate_collective(share, (*share.shape[:-1], length), "all_gather", "tensor", group.size)
    return gather_shares(share, group, share.ndim - 1, length)


def _select_share(whole: Tensor, group: Group) -> Tensor:
    """Return this rank's equal part (n, ...) of a tensor (size * n, ...)."""
    return whole.chunk(group.size)[group.rank].contiguous()


def _select_share_of_last_dimension(whole: Tensor, group: Group) -> Tensor:
    """Return this rank's share of the last dimension."""
    share = divide_into_shares(whole.shape[-1], group.size)[group.rank]
    return whole[..., share.start : share.stop].contiguous()
