"""The random generators that a process has whether one wants them or not: torch's, Python's and numpy's."""

import random
from typing import Any, ClassVar

import attrs
import numpy as np
import torch

from drawloom.components.distributed.rng import derive_seed, generator
from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.run import RunInfo
from drawloom.graph import component


@component
class ProcessRandomness:
    """Seeds every generator of the process for this rank, saves them all, and gives them back as they were."""

    state_is_local: ClassVar[bool] = True

    job: RunInfo
    mesh: Mesh

    _before: dict[str, Any] | None = attrs.field(init=False, default=None)

    def open(self) -> None:
        """Seed all generators, each with a number of its own that follows from the run's seed and the rank."""
        self._before = generators()
        rank = self.mesh.world.rank
        torch.manual_seed(derive_seed(self.job.seed, "process", "torch", rank))
        random.seed(derive_seed(self.job.seed, "process", "python", rank))
        np.random.seed(derive_seed(self.job.seed, "process", "numpy", rank) % 2**32)

    def close(self) -> None:
        """Give back the generators as they were before the run."""
        if self._before is not None:
            set_generators(self._before)
            self._before = None

    def stream(self, *purpose: str | int) -> torch.Generator:
        """A generator on the CPU that follows from the run's seed and this purpose alone."""
        return generator(self.job.seed, *purpose)

    def state_dict(self) -> dict[str, Any]:
        """Where each generator of this rank stands."""
        return generators()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on drawing from where the generators stood. A GPU's is left alone if either side has none."""
        set_generators(state)


def generators() -> dict[str, Any]:
    """Where the generators of this process stand, as tensors and plain values."""
    version, words, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,  # type: ignore[no-untyped-call]
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "numpy": _numpy_state(),
    }


def set_generators(state: dict[str, Any]) -> None:
    """Put the generators of this process where `generators` found them."""
    python = state["python"]
    torch.set_rng_state(state["torch"])
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(_numpy_arrays(state["numpy"]))
    if state["cuda"] is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.set_rng_state(state["cuda"])


def _numpy_state() -> dict[str, Any]:
    state: Any = np.random.get_state(legacy=False)
    return {
        "bit_generator": state["bit_generator"],
        "words": torch.from_numpy(state["state"]["key"].astype(np.int64)),
        "position": int(state["state"]["pos"]),
        "has_gauss": int(state["has_gauss"]),
        "gauss": float(state["gauss"]),
    }


def _numpy_arrays(state: dict[str, Any]) -> dict[str, Any]:
    words = state["words"].numpy().astype(np.uint32)
    return {
        "bit_generator": state["bit_generator"],
        "state": {"key": words, "pos": state["position"]},
        "has_gauss": state["has_gauss"],
        "gauss": state["gauss"],
    }
