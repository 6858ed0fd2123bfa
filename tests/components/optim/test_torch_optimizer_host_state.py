"""torch's optimizers with state in host memory against the same state on the device, bit for bit."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from drawloom.components.optim.adam import Adam
from drawloom.components.optim.adamw import AdamW
from drawloom.components.optim.host_states import SLOTS
from drawloom.components.optim.muon import Muon
from drawloom.components.optim.parameter_groups import AdamGroup
from drawloom.components.optim.sgd import SGD
from drawloom.components.ports.features import MemoryChoice
from drawloom.components.ports.run import Step
from drawloom.graph.problems import RecipeError
from drawloom.graph.project import Recipe
from support.checkpoints import SingleRankMesh
from support.kernels import DEVICE
from support.steps import make_skipped_step
from support.transfers import DelayedTransfers, NoWaits
from support.weights import Weights

SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (20, 24),
    "layers.0.up": (33, 24),
    "layers.0.norm": (7,),
    "layers.1.up": (33, 24),
    "layers.1.experts": (3, 9, 6),
    "layers.1.down": (24, 33),
    "layers.2.up": (30, 24),
    "layers.2.down": (24, 30),
}
KINDS: list[tuple[Any, dict[str, Any]]] = [
    (AdamW, {"groups": [AdamGroup(targets=["layers.1.*"], lr_multiplier=0.5)]}),
    (Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (SGD, {"nesterov": True, "weight_decay": 0.1}),
    (Muon, {}),
]
SLOT = 1
"""Bytes that are too few: a slot then has room for the largest parameter's state, and small ones share a slot."""


class PartOnHost:
    """Memory policy with half of the state in host memory."""

    def choose(self) -> MemoryChoice:
        return MemoryChoice(("none",), frozenset(), (0.5,))


def open_optimizer(kind: Any, weights: Weights, transfers: Any = None, **settings: Any) -> Any:
    """Return an open optimizer, whose state is on the host if there are transfers."""
    where = {} if transfers is None else {"states": "host", "slot_bytes": SLOT}
    optimizer = kind(parameters=weights, mesh=SingleRankMesh(), lr=0.01, **{**where, **settings})
    optimizer.open_transfers = lambda device: transfers
    optimizer.open()
    return optimizer


def take_steps(weights: Weights, optimizer: Any, first: int, last: int) -> None:
    """Take steps; the second one is skipped."""
    for number in range(first, last + 1):
        weights.give_gradients(number)
        optimizer.run_phase(make_skipped_step(number, last) if number == 2 else Step(number, last))


def assert_same(one: tuple[Weights, Any], other: tuple[Weights, Any]) -> None:
    """Assert that weights and state have the same bits."""
    for (name, ours), (_, theirs) in zip(one[0].named_parameters(), other[0].named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    state, expected = (optimizer.state_dict() for _, optimizer in (one, other))
    for name, values in expected.items():
        assert state[name].keys() == values.keys()
        assert all(torch.equal(state[name][key].to(value.device), value) for key, value in values.items()), name


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("seed", [0, 1])
def test_streamed_state_has_the_bits_of_resident_state(kind: Any, options: dict[str, Any], seed: int) -> None:
    """Delayed copies of several pieces, a skipped step, and a resume in either direction change no bit."""
    resident, streamed = Weights(SHAPES, device=DEVICE), Weights(SHAPES, device=DEVICE)
    transfers = DelayedTransfers(seed)
    ours, theirs = open_optimizer(kind, streamed, transfers, **options), open_optimizer(kind, resident, **options)
    pieces = [len(stream.stream.pieces) for stream in ours._streamed.values()]
    assert SLOTS < sum(pieces) < len(SHAPES)
    for first, last in ((1, 1), (2, 3)):
        take_steps(streamed, ours, first, last)
        take_steps(resident, theirs, first, last)
        assert_same((streamed, ours), (resident, theirs))
    saved = copy.deepcopy(ours.state_dict())
    moments = [value for values in saved.values() for key, value in values.items() if key != "step"]
    assert ours.host_bytes() == sum(tensor.nbytes for tensor in moments)
    assert transfers.stored % ours.host_bytes() == 0
    resumed = open_optimizer(kind, streamed, DelayedTransfers(seed + 10), **options)
    resumed.load_state_dict(saved)
    theirs.load_state_dict(saved)
    take_steps(streamed, resumed, 4, 5)
    take_steps(resident, theirs, 4, 5)
    assert_same((streamed, resumed), (resident, theirs))
    resumed.close()


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_policy_moves_a_part_of_the_state(kind: Any, options: dict[str, Any]) -> None:
    """Host and device together have all of the state, and an optimizer that goes back takes the same steps again."""
    resident, divided = Weights(SHAPES, device=DEVICE), Weights(SHAPES, device=DEVICE)
    theirs = open_optimizer(kind, resident, **options)
    policy: Any = PartOnHost()
    ours = open_optimizer(kind, divided, DelayedTransfers(3), states="device", memory=policy, **options)
    take_steps(divided, ours, 1, 3)
    take_steps(resident, theirs, 1, 3)
    assert_same((divided, ours), (resident, theirs))
    total = theirs.device_bytes()["optimizer_state"]
    slots = sum(memory.nbytes for memory in ours._slots.memory)
    assert 0.5 * total <= ours.host_bytes() < total
    assert ours.device_bytes()["optimizer_state"] == total - ours.host_bytes() + slots
    for optimizer in (ours, theirs):
        optimizer.load_state_dict({})
    take_steps(divided, ours, 4, 4)
    take_steps(resident, theirs, 4, 4)
    assert_same((divided, ours), (resident, theirs))


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_step_that_does_not_wait_is_noticed(kind: Any, options: dict[str, Any]) -> None:
    """Transfers that skip a wait change weights, so the comparison above can fail."""
    resident, streamed = Weights(SHAPES, device=DEVICE), Weights(SHAPES, device=DEVICE)
    ours, theirs = open_optimizer(kind, streamed, NoWaits(3), **options), open_optimizer(kind, resident, **options)
    take_steps(streamed, ours, 1, 4)
    take_steps(resident, theirs, 1, 4)
    pairs: list[tuple[Tensor, Tensor]] = [
        (streamed.parameters[name].detach(), resident.parameters[name].detach()) for name in SHAPES
    ]
    assert any(not torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("use=optim.adamw", "slot_bytes=100"), "nothing is streamed through slots"),
        (("use=optim.sgd", "states=host", "dampening=0.5"), "begins with the first gradient"),
        (("use=optim.sgd", "states=host", "momentum=0.0"), "no state to stream"),
    ],
)
def test_check_refuses_settings_without_effect(words: tuple[str, ...], message: str) -> None:
    """A slot without a stream, and momentum that can't be streamed, are problems."""
    with pytest.raises(RecipeError, match=message):
        Recipe.load("first_run", "optimizer.lr=0.1", *(f"optimizer.{word}" for word in words)).check()
