"""
The buffers of a module that was built on the meta device, where the values that its constructor wrote are lost.

They are restored by torch's convention: a module that owns buffers fills them in `reset_parameters()`, together with
its own parameters.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from drawloom.components.distributed.rng import derive_seed
from drawloom.graph import UserError


def fill_buffers(module: nn.Module, device: torch.device, seed: int) -> None:
    """
    Allocate all buffers of a module, persistent or not, and fill them by the `reset_parameters()` of their owners.

    Random values depend on the seed and the owner's name, and the process's generators keep their state. The owner's
    own parameters are allocated as well. Raises UserError for an owner that does not fill all of its buffers.
    """
    for name, owner in module.named_modules():
        if any(True for _ in owner.buffers(recurse=False)):
            _fill(name, owner, device, derive_seed(seed, "buffers", name))


def _fill(name: str, owner: nn.Module, device: torch.device, seed: int) -> None:
    owner.to_empty(device=device, recurse=False)
    # An inherited reset_parameters() may not know of a buffer. A buffer that it fills has the same values after a fill
    # with 0 as after a fill with 1.
    first, second = (_values(name, owner, device, seed, before) for before in (0, 1))
    if left := [key for key, value in first.items() if not torch.equal(value, second[key])]:
        raise _unfilled(name, owner, left, "has a reset_parameters() that does not fill them")


def _values(name: str, owner: nn.Module, device: torch.device, seed: int, before: int) -> dict[str, Tensor]:
    reset = getattr(owner, "reset_parameters", None)
    if reset is None:
        raise _unfilled(name, owner, [key for key, _ in _own(owner)], "has no reset_parameters() that fills them")
    with torch.no_grad(), device, _seeded(device, seed):
        for _, buffer in _own(owner):
            buffer.fill_(before)
        reset()
    return {key: buffer.clone() for key, buffer in _own(owner)}


def _own(owner: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return owner.named_buffers(recurse=False)


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    # The process's generators keep their state, or dropout would depend on which modules a rank builds.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _unfilled(name: str, owner: nn.Module, buffers: list[str], why: str) -> UserError:
    where = f"the module {name} ({type(owner).__name__})" if name else f"the module {type(owner).__name__}"
    return UserError(
        f"{where} registers the buffers {', '.join(buffers)}, but {why}: it is built without memory, so that what its "
        "constructor puts there is lost",
        exit_code=2,
    )
