"""What part of a whole parameter a rank holds, so that noise belongs to elements of the whole."""

from typing import Any

import attrs
from torch import Tensor

from drawloom.components.distributed.rng import derive_seed


@attrs.frozen
class Shard:
    """A part that is one run of the whole's elements begins at `first`; of any other, `offset` says which it is."""

    first: int = 0
    offset: tuple[int, ...] = ()

    def key(self, seed: int, *purpose: str) -> int:
        """A number for the noise of this part: the whole's, unless the part is no run of it."""
        return derive_seed(seed, *purpose, *self.offset)


def local_part(tensor: Any) -> Tensor:
    """The part that this rank holds; the tensor itself unless it is distributed."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def shard_of(parameter: Any, multiple: int) -> Shard:
    """Which part of the whole this rank holds; a run counts as one if it begins at a multiple of this number."""
    if not hasattr(parameter, "to_local"):
        return Shard()
    # Takes half a second, which runs without distributed tensors need not wait.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    whole, mesh = parameter.shape, parameter.device_mesh
    shape, offset = compute_local_shape_and_global_offset(whole, mesh, parameter.placements)
    first = 0
    for size, place in zip(whole, offset, strict=True):
        first = first * size + place
    return Shard(first) if _is_run(shape, whole) and first % multiple == 0 else Shard(offset=tuple(offset))


def _is_run(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether a part of this shape is one run of elements: before its last divided dimension it is 1 wide."""
    divided = [place for place, (part, size) in enumerate(zip(shape, whole, strict=True)) if part != size]
    return not divided or all(size == 1 for size in shape[: divided[-1]])
