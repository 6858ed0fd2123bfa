"""Optimizer state in host memory against the same state on the device, bit for bit."""

import copy
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.transfers import DeviceTransfers
from drawloom.components.optim.host_states import SLOTS
from drawloom.components.optim.parameter_groups import AdamGroup
from drawloom.components.optim.stochastic_adamw import StochasticAdamW
from drawloom.components.optim.streamed_states import (
    Slots,
    StreamedStep,
    cut_ranges_by_state_bytes,
    list_state_tensors,
    round_up_to_alignment,
)
from drawloom.components.ports.features import MemoryChoice
from drawloom.components.ports.run import Step
from drawloom.components.ports.slices import TensorSlice
from drawloom.graph import UserError
from drawloom.kernels.adamw.eager import AdamwEager, ParamState, compute_step_scalars
from support.checkpoints import SingleRankMesh
from support.kernels import DEVICE
from support.pipelines import Job
from support.steps import make_skipped_step
from support.transfers import DelayedTransfers, NoWaits
from support.weights import Weights

SHAPES: dict[str, tuple[int, ...]] = {"matrix": (40, 96), "vector": (7,), "table": (130, 33), "last": (16, 16)}
SLOT = 8192


def open_optimizer(weights: Weights, transfers: Any = None, **settings: Any) -> StochasticAdamW:
    """Return an open optimizer whose state is on the host if there are transfers."""
    kind: Any = DEVICE.type
    device: Any = ComputeDevice(kind=kind)
    where = {} if transfers is None else {"states": "host", "slot_bytes": SLOT}
    optimizer = StochasticAdamW(
        parameters=weights, mesh=SingleRankMesh(), job=Job(), device=device, lr=0.01, **{**where, **settings}
    )
    if transfers is not None:
        optimizer.open_transfers = lambda device: transfers
    optimizer.open()
    return optimizer


def narrow_weights() -> Weights:
    return Weights(SHAPES, torch.bfloat16, DEVICE)


def take_steps(weights: Weights, optimizer: StochasticAdamW, first: int, last: int) -> None:
    for number in range(first, last + 1):
        weights.give_gradients(number)
        optimizer.run_phase(make_skipped_step(number, last) if number == 2 else Step(number, last))


def assert_same(one: tuple[Weights, StochasticAdamW], other: tuple[Weights, StochasticAdamW]) -> None:
    for (name, ours), (_, theirs) in zip(one[0].named_parameters(), other[0].named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    state, expected = (optimizer.state_dict() for _, optimizer in (one, other))
    for name, values in expected.items():
        for key, value in values.items():
            equal = torch.equal(state[name][key].to(value.device), value) if isinstance(value, Tensor) else True
            assert equal, (name, key)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"state_dtype": "float32", "amsgrad": True},
    {"split_master_weights": True},
    {"state_dtype": "uint8"},
    {"state_dtype": "uint8", "split_master_weights": True},
    {
        "split_master_weights": True,
        "state_dtype": "float32",
        "groups": [AdamGroup(targets=["table"], lr_multiplier=0.5)],
    },
]


@attrs.frozen
class PartOnHost:
    """Memory policy for one rank, with a fraction of the state in host memory."""

    fraction: float

    def choose(self) -> MemoryChoice:
        return MemoryChoice(("none",), frozenset(), (self.fraction,))


@pytest.mark.parametrize("options", [OPTIONS[2], OPTIONS[4], OPTIONS[5]])
def test_a_part_of_the_state_on_the_host_changes_no_bit(options: dict[str, Any]) -> None:
    """A policy moves at least its fraction, parameter by parameter; host and device together hold all of the state."""
    resident, divided = narrow_weights(), narrow_weights()
    theirs = open_optimizer(resident, **options)
    policy: Any = PartOnHost(0.4)
    ours = open_optimizer(divided, DelayedTransfers(5), states="device", memory=policy, **options)
    take_steps(divided, ours, 1, 3)
    take_steps(resident, theirs, 1, 3)
    assert_same((divided, ours), (resident, theirs))
    total = theirs.device_bytes()["optimizer_state"]
    assert 0.4 * total <= ours.host_bytes() < total
    assert ours.device_bytes()["optimizer_state"] == total - ours.host_bytes() + SLOTS * min(SLOT, ours.host_bytes())
    ours.close()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_streamed_state_has_the_bits_of_resident_state(options: dict[str, Any], seed: int) -> None:
    """Delayed copies of many pieces, a skipped step and a resume change no bit in weights or state."""
    resident, streamed = narrow_weights(), narrow_weights()
    transfers = DelayedTransfers(seed)
    ours, theirs = open_optimizer(streamed, transfers, **options), open_optimizer(resident, **options)
    for first, last in ((1, 1), (2, 3)):
        take_steps(streamed, ours, first, last)
        take_steps(resident, theirs, first, last)
        assert_same((streamed, ours), (resident, theirs))
    saved = copy.deepcopy(ours.state_dict())
    tensors = [value for values in saved.values() for value in values.values() if isinstance(value, Tensor)]
    assert transfers.stored == 2 * sum(tensor.nbytes for tensor in tensors)
    assert 0 <= transfers.fetched - transfers.stored <= SLOTS * SLOT  # the next step's first pieces
    resumed = open_optimizer(streamed, DelayedTransfers(seed + 10), **options)
    resumed.load_state_dict(saved)
    take_steps(streamed, resumed, 4, 5)
    take_steps(resident, theirs, 4, 5)
    assert_same((streamed, resumed), (resident, theirs))
    resumed.close()


class NoOrder(DelayedTransfers):
    """Transfers that fetch into a slot before its last piece has left."""

    def copy_to_device(self, copies: Any, after: Any = ()) -> Any:
        return super().copy_to_device(copies)


@pytest.mark.parametrize("faulty", [NoWaits, NoOrder])
def test_races_are_noticed(faulty: Any) -> None:
    """Transfers that skip a wait change weights, so the comparison above can fail."""
    resident, streamed = narrow_weights(), narrow_weights()
    for weights, optimizer in ((streamed, open_optimizer(streamed, faulty(3))), (resident, open_optimizer(resident))):
        take_steps(weights, optimizer, 1, 4)
    pairs = zip(streamed.named_parameters(), resident.named_parameters(), strict=True)
    assert any(not torch.equal(ours, theirs) for (_, ours), (_, theirs) in pairs)


def test_streamed_states_equal_resident_ones_with_real_transfers() -> None:
    """With a run's transfers, weights and states have the bits of resident ones, and the device has only the slots."""
    resident, streamed = narrow_weights(), narrow_weights()
    ours, theirs = open_optimizer(streamed, DeviceTransfers(DEVICE)), open_optimizer(resident)
    for weights, optimizer in ((streamed, ours), (resident, theirs)):
        take_steps(weights, optimizer, 1, 3)
    assert_same((streamed, ours), (resident, theirs))
    assert ours.device_bytes() == {"optimizer_state": SLOTS * SLOT} != theirs.device_bytes()
    ours.close()


def rows_of_columns() -> ParamState:
    """Return columns 20 to 50, in rows of 100, as a tensor-parallel rank has them."""
    weight = torch.randn(90, 30, device=DEVICE).bfloat16()
    mean, square = (torch.zeros_like(weight) for _ in "ms")
    return ParamState(weight, mean, square, 0.1, 5, 20, 30, 100)


def test_slices_of_rows_are_cut_between_rows() -> None:
    """Columns on one rank keep their noise, and every element is in one range that fits a slot."""
    param, whole = rows_of_columns(), rows_of_columns()
    whole.weight.copy_(param.weight)
    ranges = list(cut_ranges_by_state_bytes(0, param, 2048))
    assert [part.start for part in ranges] == [0, *(part.stop for part in ranges[:-1])] and len(ranges) > 2
    assert ranges[-1].stop == 2700 and all(part.start % 30 == 0 and part.state_bytes <= 2048 for part in ranges)
    slots = Slots(DelayedTransfers(4), DEVICE, 2048)
    slots.allocate_slots()
    streamed, resident = StreamedStep(AdamwEager, slots, [param], False), AdamwEager([whole])
    for number in range(1, 4):
        grads, scalars = [torch.randn(90, 30, device=DEVICE)], compute_step_scalars(1e-2, (0.9, 0.95), 1e-8, number)
        streamed.step(grads, scalars, number)
        resident.step(grads, scalars, number)
    slots.transfers.synchronize()
    assert torch.equal(param.weight, whole.weight)
    assert all(
        torch.equal(list_state_tensors(param)[name], tensor) for name, tensor in list_state_tensors(whole).items()
    )


def test_a_slot_smaller_than_a_row_is_an_error() -> None:
    """The error has both sizes and the setting."""
    with pytest.raises(
        UserError, match=rf"takes {2 * round_up_to_alignment(1024)} bytes, and a slot has 512; .* larger slot_bytes"
    ):
        open_optimizer(narrow_weights(), DelayedTransfers(), slot_bytes=512)


def test_tensor_slices_reach_the_noise() -> None:
    """A shard's streamed weights get the noise of its elements in the whole parameter."""
    whole, part = Weights({"w": (8, 64)}, torch.bfloat16, DEVICE), Weights({"w": (4, 64)}, torch.bfloat16, DEVICE)
    part.parameter_slices = lambda: {"w": TensorSlice((8, 64), (4, 0), (4, 64))}  # type: ignore[method-assign]
    with torch.no_grad():
        part.parameters["w"].copy_(whole.parameters["w"][4:])
    for weights, transfers in ((whole, None), (part, DelayedTransfers(1))):
        optimizer = open_optimizer(weights, transfers, implementation="eager")
        grad = torch.linspace(-1, 1, 512, device=DEVICE).view(8, 64)
        weights.parameters["w"].grad = grad[-len(weights.parameters["w"]) :].bfloat16()
        optimizer.run_phase(Step(1, 1))
    assert torch.equal(whole.parameters["w"][4:], part.parameters["w"])


def test_a_loaded_state_replaces_what_was_prefetched() -> None:
    """An optimizer that goes back takes the same steps again, although the next step's pieces were on the device."""
    weights = narrow_weights()
    optimizer = open_optimizer(weights, DelayedTransfers(5))
    take_steps(weights, optimizer, 1, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    start = {name: part.detach().clone() for name, part in weights.named_parameters()}
    ends = []
    for _ in range(2):
        take_steps(weights, optimizer, 3, 4)
        ends.append({name: part.detach().clone() for name, part in weights.named_parameters()})
        optimizer.load_state_dict(saved)
        with torch.no_grad():
            for name, part in weights.named_parameters():
                part.copy_(start[name])
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in start)
