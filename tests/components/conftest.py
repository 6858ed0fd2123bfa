"""Doubles for the tests of several subjects."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from drawloom.components.distributed.mesh_layout import MeshView
from drawloom.components.ports.distributed import PerDimension


@attrs.frozen
class OneRankGroup:
    """A group of one."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")

    def sum(self, tensor: Tensor) -> None: ...

    def max(self, tensor: Tensor) -> None: ...

    def broadcast(self, tensor: Tensor, source: int) -> None: ...

    may_break: bool = False

    def raise_if_broken(self) -> None: ...

    def wait_and_raise_if_broken(self) -> None: ...

    def gather_json(self, value: Any) -> list[Any]:
        return [value]


@attrs.frozen
class FakeMesh(MeshView):
    """A mesh of given sizes, as the rank at given indices sees it. Its groups contain only this rank."""

    sizes: PerDimension = attrs.field(factory=PerDimension)
    indices: PerDimension = attrs.field(factory=PerDimension.of_first_rank)
    world: Any = attrs.field(factory=OneRankGroup)
    replica_group: Any = attrs.field(factory=OneRankGroup)

    def group(self, *dimensions: str) -> Any:
        return self.replica_group if "data_replicate" in dimensions else OneRankGroup()

    def create_torch_mesh(self, *dimensions: Sequence[str]) -> Any:
        raise AssertionError("nothing is sharded")


@attrs.frozen
class FakeJob:
    """A run."""

    name: str = "test"
    seed: int = 7
    folder_path: Path = Path("runs/test")


@pytest.fixture(scope="session")
def one_rank() -> FakeMesh:
    """Return the mesh of a single process."""
    return FakeMesh()


@pytest.fixture(scope="session")
def mesh_of() -> Callable[..., FakeMesh]:
    """Makes a rank's mesh: `mesh_of(sizes={"data_replicate": 2}, indices={"data_replicate": 1})`."""
    return _make_mesh


def _make_mesh(sizes: Mapping[str, int] = {}, indices: Mapping[str, int] = {}, **groups: Any) -> FakeMesh:
    return FakeMesh(PerDimension(**sizes), attrs.evolve(PerDimension.of_first_rank(), **indices), **groups)


@pytest.fixture(scope="session")
def job() -> FakeJob:
    """Return a run with seed 7."""
    return FakeJob()
