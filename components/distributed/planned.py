"""Planned ranks and devices: a mesh layout without processes, and a device without memory."""

from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from drawloom.components.distributed.mesh_layout import Layout, MeshView
from drawloom.components.distributed.mesh_sizes import resolve_layout
from drawloom.components.distributed.single_process import Done, HostMemory, SingleProcess
from drawloom.ports import DIMENSIONS, Pending, PerDimension, Settings, SymmetricMemory


@attrs.frozen
class PlannedGroup(SingleProcess):
    """Group of imaginary ranks: collectives return meta tensors unchanged, or empty tensors with the right shape."""

    ranks: tuple[int, ...]
    rank: int
    device = torch.device("meta")

    @property
    def size(self) -> int:  # type: ignore[override]
        return len(self.ranks)

    def gather_json(self, value: Any) -> list[Any]:
        """Return the value once per rank."""
        return [value] * self.size

    def gather(self, tensor: Tensor) -> Tensor:
        """Return an empty tensor (size, ...) for a tensor (...)."""
        return tensor.new_empty(self.size, *tensor.shape)

    def gather_unequal_shapes(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return empty tensors with this tensor's shape (...)."""
        return [torch.empty_like(tensor)] * self.size

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        """Return an empty tensor (...) for parts (size, ...)."""
        return torch.empty_like(parts[0])

    def start_shift(self, sent: Tensor, received: Tensor, distance: int) -> Pending:
        """Leave the tensors (any shape) unchanged."""
        return Done()

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Return an empty tensor (sum(received), ...) for rows (sum(sent), ...)."""
        return rows.new_empty(sum(received), *rows.shape[1:])

    def allocate_symmetric_memory(self, size: int) -> SymmetricMemory:
        """Return `size` bytes on the meta device."""
        return HostMemory([torch.empty(size, dtype=torch.uint8, device="meta")] * self.size, self)


@attrs.frozen
class PlannedMesh(MeshView):
    """One rank's view of an imaginary mesh."""

    layout: Layout
    rank: int = 0

    @classmethod
    def from_settings(cls, settings: Settings, ranks: int) -> "PlannedMesh":
        """
        Return the mesh for a recipe's settings with `ranks` ranks, seen from rank 0. Raises UserError if they don't
        fit.
        """
        sizes = {name: settings.get(name, 1) for name in DIMENSIONS}
        expert = PerDimension.from_settings(settings).expert
        return cls(resolve_layout(sizes, expert, ranks, lambda number: f"write --ranks {number}"))

    def group(self, *dimensions: str) -> PlannedGroup:
        ranks = self.ranks(*dimensions)
        return PlannedGroup(tuple(ranks), ranks.index(self.rank))

    def create_torch_mesh(self, *dimensions: Sequence[str]) -> Any:
        """Return None, because there are no processes for torch."""
        return None

    def seen_from_pipeline_rank(self, pipeline_rank: int) -> "PlannedMesh":
        """Return the same mesh, seen from the first rank with index `pipeline_rank` along the pipeline."""
        return attrs.evolve(self, rank=pipeline_rank * (self.layout.world_size // self.sizes.pipeline))


@attrs.frozen
class PlannedDevice:
    """Device for choosing kernels, without allocations."""

    device: torch.device
    backend: str = "gloo"
    shares_gpu: ClassVar[bool] = False

    def make_current(self) -> None:
        """Do nothing, because nothing is allocated."""

    def get_peak_memory_so_far(self) -> int:
        """Return 0, because nothing is allocated."""
        return 0
