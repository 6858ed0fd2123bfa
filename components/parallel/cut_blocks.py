"""Ranks along `tensor` that cut a matrix's blocks of columns, known before a run."""

from torch import nn

from drawloom.components.parallel.tensor_ranks import TensorParallel
from drawloom.ports import TensorSlice


def compute_first_rank_slice(layer: nn.Module, leaf: str, ranks: int) -> TensorSlice | None:
    """Return the first rank's slice of a layer's parameter, or None if it is whole."""
    if ranks == 1 or not isinstance(layer, TensorParallel) or (split := layer.split_dims().get(leaf)) is None:
        return None
    shape = tuple(layer.get_parameter(leaf).shape)
    size = [*shape]
    size[split.dim] = -(-shape[split.dim] // split.unit // ranks) * split.unit
    return TensorSlice(shape, (0,) * len(shape), tuple(size))


def describe_cut_block(part: TensorSlice | None, owner: str, block: int) -> str:
    """Return how a rank's slice of a matrix cuts its owner's blocks of columns, as the end of a sentence, or ""."""
    if part is None:
        return ""
    first, size, width = part.offsets[-1], part.size[-1], part.shape[-1]
    if first % block or (size % block and first + size != width):
        return f"has columns {first} to {first + size} on one rank along tensor, and {owner} blocks of {block}"
    return ""
