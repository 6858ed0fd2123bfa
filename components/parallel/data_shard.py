"""The dimension along which ranks shard parameters (FSDP), and the slices of parameters; `fsdp.py` gathers them."""

from collections.abc import Iterator, Set
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor, nn

from drawloom import Problem
from drawloom.components.parallel.dimension import Dimension, RankParameters
from drawloom.ports import HeadLayer, StageNodes, TensorSlice


@attrs.define(eq=False)
class DataShardDimension(Dimension):
    """Ranks with a slice of every parameter (FSDP, ZeRO-3); ranks along `context` shard parameters, too."""

    name: ClassVar[str] = "data_shard"

    @classmethod
    def check(cls, nodes: StageNodes) -> Iterator[Problem]:
        """Yield a problem for a gradient dtype that FSDP can't keep: gradients have the parameters' dtype."""
        if nodes.precision is None or nodes.sizes.data_shard * nodes.sizes.context == 1:
            return
        dtype, grad_dtype = nodes.precision.settings["parameter"], nodes.precision.settings["gradient"]
        if grad_dtype is not None and grad_dtype != dtype:
            text = (
                f"gradients of sharded parameters are kept in the parameters' dtype, {dtype!r}, and not in "
                f"{grad_dtype!r}"
            )
            yield nodes.precision.problem("gradient", text, f"write parameter = {grad_dtype!r}, or leave gradient out")

    @classmethod
    def notes(cls, nodes: StageNodes) -> Iterator[str]:
        sizes = nodes.sizes
        if (ranks := sizes.data_shard * sizes.context) > 1:
            gathers_per_block = should_gather_per_block(nodes.stages.settings["reshard_after_forward"], sizes.pipeline)
            frequency = "by layer" if gathers_per_block else "once a step"
            yield f"parameters, gradients and moments: sharded over {ranks} ranks; weights are gathered {frequency}"

    def list_copies_owned_elsewhere(self, parameters: RankParameters) -> Set[str]:
        """Return the unsharded parameters, such as the loss's, without experts; none on the first rank, their owner."""
        if not self.mesh.shard_group.rank:
            return frozenset()
        return parameters.trained.keys() - parameters.sharded - parameters.experts


def should_gather_per_block(setting: bool | None, pipeline_ranks: int) -> bool:
    """Return whether layers are gathered when they are used, by the setting and the number of pipeline ranks."""
    # In a pipeline, each microbatch would gather each block anew; so the whole stage is gathered once a step.
    return pipeline_ranks == 1 if setting is None else setting


def find_untied_heads(module: nn.Module) -> list[nn.Module]:
    """Return a stage's layers that consist of an untied head."""
    return [part for part in module.children() if isinstance(part, HeadLayer)]


def get_local_slice(tensor: Any) -> Tensor:
    """Return this rank's slice of a DTensor (any shape), sharing its memory, without a graph."""
    with torch.no_grad():
        part: Tensor = tensor.to_local().detach()
    return part


def get_tensor_slice(tensor: Any) -> TensorSlice:
    """Return this rank's slice position in a DTensor (any shape); its mesh's last dimension shards the rows."""
    mesh, last = tensor.device_mesh, tensor.device_mesh.ndim - 1
    return slice_rows(tuple(tensor.shape), mesh.size(last), mesh.get_local_rank(last))


def slice_rows(shape: tuple[int, ...], ranks: int, rank: int) -> TensorSlice:
    """Return a rank's slice of a parameter, divided along its first dimension; the last ranks' may be smaller."""
    share = -(-shape[0] // ranks)
    first = min(rank * share, shape[0])
    return TensorSlice(shape, (first, *[0] * (len(shape) - 1)), (min(share, shape[0] - first), *shape[1:]))
