"""
Initial values of a module that was built on the meta device, where the values that its constructor wrote are lost.

They are restored by torch's convention: a module that owns buffers, or parameters that no blueprint initialises, fills
them in `reset_parameters()`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from drawloom.components.distributed.rng import derive_seed
from drawloom.graph import UserError

Tensors = Callable[[nn.Module], Iterator[tuple[str, Tensor]]]
"""Those tensors of a module, by their names in it, that its `reset_parameters()` has to fill."""


def fill_buffers(module: nn.Module, device: torch.device, seed: int) -> None:
    """
    Allocate all buffers of a module, persistent or not, and fill them by the `reset_parameters()` of their owners.

    Random values depend on the seed and the owner's name, and the process's generators keep their state. The owner's
    own parameters are allocated as well. Raises UserError for an owner that does not fill all of its buffers.
    """
    for name, owner in module.named_modules():
        if any(True for _ in _buffers(owner)):
            _fill(name, owner, device, derive_seed(seed, "buffers", name), _buffers)


def fill_parameters(name: str, module: nn.Module, device: torch.device, seed: int) -> None:
    """
    Make all parameters and buffers of a module called `name` real, with the values that their owners give them.

    As for buffers alone, what an owner draws follows from the seed and its name. Raises UserError for an owner that
    does not fill all of its tensors.
    """
    for path, owner in module.named_modules(prefix=name):
        if any(True for _ in _tensors(owner)):
            _fill(path, owner, device, derive_seed(seed, "initial weights", path), _tensors)


def _fill(name: str, owner: nn.Module, device: torch.device, seed: int, tensors: Tensors) -> None:
    owner.to_empty(device=device, recurse=False)
    # An inherited reset_parameters() may not know of a tensor. A tensor that it fills has the same values after a fill
    # with 0 as after a fill with 1.
    first, second = (_values(name, owner, device, seed, before, tensors) for before in (0, 1))
    if left := [key for key, value in first.items() if not torch.equal(value, second[key])]:
        raise _unfilled(name, owner, left, "has a reset_parameters() that does not fill them")


def _values(
    name: str, owner: nn.Module, device: torch.device, seed: int, before: int, tensors: Tensors
) -> dict[str, Tensor]:
    """The owner's tensors after `reset_parameters()`, having been `before` everywhere."""
    reset = getattr(owner, "reset_parameters", None)
    if reset is None:
        raise _unfilled(name, owner, [key for key, _ in tensors(owner)], "has no reset_parameters() that fills them")
    with torch.no_grad(), device, _seeded(device, seed):
        for _, tensor in tensors(owner):
            tensor.fill_(before)
        reset()
    return {key: tensor.detach().clone() for key, tensor in tensors(owner)}


def _buffers(owner: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return owner.named_buffers(recurse=False)


def _tensors(owner: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(owner.named_parameters(recurse=False), _buffers(owner))


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    # The process's generators keep their state, or dropout would depend on which modules a rank builds. manual_seed
    # seeds the generators of all devices; fork_rng forks that of the CPU by default.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _unfilled(name: str, owner: nn.Module, tensors: list[str], why: str) -> UserError:
    where = f"the module {name} ({type(owner).__name__})" if name else f"the module {type(owner).__name__}"
    kind = "buffers" if set(tensors) <= {key for key, _ in _buffers(owner)} else "tensors"
    return UserError(
        f"{where} registers the {kind} {', '.join(tensors)}, but {why}: it is built without memory, so that what its "
        "constructor puts there is lost",
        exit_code=2,
    )
