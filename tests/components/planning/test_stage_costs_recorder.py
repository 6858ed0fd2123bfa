"""Recording of operations on the meta device."""

import attrs
import pytest
import torch
from torch import nn

import support.kernels  # noqa: F401, for kernels in Triton's interpreter
from drawloom.components.distributed.device_model import DeviceModel, Link, Reached
from drawloom.components.parallel.meta_collectives import emulate_collective
from drawloom.components.planning.attention import AttentionFractions
from drawloom.components.planning.stage_costs import PassCost, Recorder
from drawloom.kernels.cross_entropy.options import LogitCut
from drawloom.kernels.cross_entropy.triton import cut_cross_entropy_triton

DEVICE = DeviceModel(
    name="made up",
    peaks={"float32": 1e6},
    memory=0,
    bandwidth=1e6,
    link=1.0,
    network=1.0,
    reached=Reached(products=0.5, attention=0.25, memory=1.0, launch=0.0, host=1.0),
)


def recorder(attended: AttentionFractions | None = None, **reached: float) -> Recorder:
    """Return a recorder for a device with a million bytes and operations per second; products reach half."""
    device = attrs.evolve(DEVICE, reached=attrs.evolve(DEVICE.reached, **reached))
    return Recorder(device, lambda _: Link(100.0, 0.5, 3.0), attended or AttentionFractions())


def test_memory_is_counted_until_it_is_freed() -> None:
    """Results with shared memory count once, parameters not at all, and freed memory only in the peak."""
    weight = nn.Parameter(torch.empty(256, 256, device="meta"))
    with recorder() as recording:
        recording.begin_pass()
        x = torch.empty(256, 256, device="meta")
        with recording.label_new_storages("kept"):
            y = x @ weight.detach().t()
        del x
        view = y.view(-1)
        part = recording.end_pass()
    assert view.shape == (256 * 256,)
    assert (part.kept_bytes, part.peak_delta) == ({"kept": 2**18}, 2 * 2**18)


def test_autograd_keeps_the_tensors_of_a_real_graph() -> None:
    """They are the inputs of the product and of the nonlinearity, and nothing after the backward pass."""
    weight = nn.Parameter(torch.empty(64, 64, device="meta"))
    weight.grad = torch.empty_like(weight)
    with recorder() as recording:
        recording.begin_pass()
        loss = (torch.empty(64, 64, device="meta") @ weight).relu().sum()
        assert recording.end_pass().total_kept_bytes == 2 * 64 * 64 * 4 + 512
        loss.backward()  # type: ignore[no-untyped-call]
        del loss
        assert recording.end_pass().total_kept_bytes == 0


def test_an_operation_takes_as_long_as_its_slower_side() -> None:
    """Arithmetic at half of the peak, or memory traffic; the host issues both."""
    wide, narrow = torch.empty(100, 1000, device="meta"), torch.empty(1000, 100, device="meta")
    with recorder() as recording:
        recording.begin_pass()
        _ = wide @ narrow
        product = recording.end_pass()
        recording.begin_pass()
        _ = wide + 1
        addition = recording.end_pass()
    assert (product.flops, product.seconds) == (2 * 100 * 1000 * 100, pytest.approx(2e7 / 5e5))
    assert (addition.flops, addition.seconds) == (0, pytest.approx(2 * 4e5 / 1e6))
    assert product.host == addition.host == 1.0


@pytest.mark.parametrize("least", [0.0, 0.1])
def test_the_peak_includes_workspaces_of_operations(least: float) -> None:
    """Cut cross entropy holds gradients of logits, sums in float32, and a copy of the weight if a filter sorts it."""
    tokens, width, words = 256, 64, 512
    hidden = torch.empty(tokens, width, device="meta", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.empty(words, width, device="meta", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.empty(tokens, device="meta", dtype=torch.int64)
    with recorder() as recording:
        losses = cut_cross_entropy_triton(hidden, weight, targets, LogitCut(filter_eps=least))[0]
        grad = torch.empty_like(losses)
        recording.begin_pass()
        grads = torch.autograd.grad(losses, (hidden, weight), grad)
        rise = recording.end_pass().peak_delta
    mine = 2 * tokens * words + 4 * words * width + (2 * words * width if least else 0)
    small = 16 * tokens  # numbers by token, some of them twice
    assert mine < rise - sum(leaf_grad.nbytes for leaf_grad in grads) <= mine + small


def test_collectives_take_the_time_of_links() -> None:
    """
    A collective takes its sent bytes at the rate reached on the link between its ranks, and its latency; the floor has
    the link's own rate alone.
    """
    with recorder() as recording:
        recording.begin_pass()
        emulate_collective(torch.empty(100, device="meta"), [400], "all_gather", "tensor", 4)
        part = recording.end_pass()
    assert part.comm_seconds == part.seconds == 3.0 + 1600 * 0.75 / 50
    assert part.work["tensor"].links == 1600 * 0.75 / 100


def test_a_launch_comes_before_an_operations_work() -> None:
    """Every operation takes a launch longer, on the device, than its arithmetic or its memory traffic."""
    for size in (1, 1_000_000):
        with recorder(launch=0.25) as recording:
            recording.begin_pass()
            torch.empty(size, device="meta").neg()
            part = recording.end_pass()
        assert part.seconds == pytest.approx(0.25 + 8 * size / 1e6)


def test_the_device_waits_for_a_host_that_has_waited_for_it() -> None:
    """
    A host issues operations ahead of the device until it needs a result. Then short operations take as long as the host
    needs to issue them, while longer ones give it a lead again.
    """
    for waits, idle in ((False, 0.0), (True, 2.0)):
        with recorder() as recording:  # the host takes a second by operation
            recording.begin_pass()
            x = torch.empty(250_000, device="meta")
            x.neg()
            if waits:
                emulate_collective(x, x.shape, "wait", "expert", 2)
            for _ in range(3):  # two seconds each: only the first is late
                x.neg()
            small = torch.empty(1, device="meta")
            for _ in range(5):  # the lead is four seconds
                small.neg()
            part = recording.end_pass()
        assert part.host == 9.0
        assert part.seconds == pytest.approx(4 * 2.0 + idle, abs=1e-3)


def test_float8_products_reach_their_own_part_of_the_peak() -> None:
    """Products of 8-bit factors have their own rate, and their floor is at the data sheet's."""
    peaks = {"float8": 2e6, "float32": 1e6}
    for dtype, seconds, floor in ((torch.float32, 4.0, 2.0), (torch.float8_e4m3fn, 4.0, 1.0)):
        device = attrs.evolve(DEVICE, peaks=peaks, reached=attrs.evolve(DEVICE.reached, float8=0.25))
        with Recorder(device, lambda _: Link(1.0), AttentionFractions()) as recording:
            recording.begin_pass()
            torch.empty(100, 100, device="meta", dtype=dtype) @ torch.empty(100, 100, device="meta", dtype=dtype)
            part = recording.end_pass()
        assert (part.seconds, part.work["products"].flops) == (pytest.approx(seconds), pytest.approx(floor))


def test_parts_add_up() -> None:
    """Seconds and bytes are multiplied by the number of blocks; the rise is the greater one of both."""
    first, second = (
        PassCost(1.0, 0.5, 2.0, 3.0, 7, 1, {"a": 1}),
        PassCost(10.0, 5.0, 20.0, 30.0, 5, -2, {"a": 1, "b": 2}),
    )
    assert first.add_repetitions(second, 2) == PassCost(21.0, 10.5, 42.0, 63.0, 7, -3, {"a": 3, "b": 4})
    assert second.add_repetitions(second, -1) == PassCost(peak_delta=5)
