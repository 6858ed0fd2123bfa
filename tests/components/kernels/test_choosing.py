"""The implementation for a device, and the error if there is none."""

import pytest
import torch
import triton

from drawloom.components.kernels import choosing
from drawloom.components.kernels.choosing import OPERATIONS, choose_implementation, load_implementation
from drawloom.graph import UserError
from drawloom.kernels import availability

CPU, GPU = torch.device("cpu"), torch.device("cuda")
ALL = [(operation, name) for operation, about in OPERATIONS.items() for name in about.implementations]


@pytest.fixture
def without_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton as it is outside of its interpreter."""
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)


@pytest.mark.parametrize(("operation", "name"), ALL)
def test_every_implementation_can_be_loaded(operation: str, name: str) -> None:
    """A name loads a callable; for attention and exchanges it loads several functions."""
    implementation = load_implementation(operation, name)
    names = {
        "attention": ("mask", "attend"),
        "moe_peers": (
            "write_tokens_to_slots",
            "localize_choices",
            "limit_routes_and_flag_overflow",
            "read_rows_and_scalars",
            "publish_token_sums",
            "read_token_sums_and_scalars",
        ),
    }
    functions = [getattr(implementation, part) for part in names.get(operation, ())] or [implementation]
    assert all(map(callable, functions))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_on_a_cpu_auto_is_eager(operation: str) -> None:
    """`auto` is eager even if other implementations could run."""
    chosen = choose_implementation(operation, "auto", CPU)
    assert (chosen.name, chosen.why) == ("eager", "the device is the CPU")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_auto_suits_the_gpu(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` is first in the operation's own list where Triton runs; elsewhere one without Triton, with the reason."""
    monkeypatch.setattr(availability, "why_no_triton", lambda device: "")
    assert choose_implementation(operation, "auto", GPU).name == OPERATIONS[operation].on_gpu[0]
    monkeypatch.setattr(availability, "why_no_triton", lambda device: "triton is not installed")
    chosen = choose_implementation(operation, "auto", GPU)
    assert chosen.name not in choosing.TRITON
    if OPERATIONS[operation].on_gpu[0] in choosing.TRITON:
        assert "triton is not installed" in chosen.why


@pytest.mark.parametrize(("operation", "name"), [pair for pair in ALL if pair[1] in choosing.TRITON | choosing.GPU])
@pytest.mark.usefixtures("without_interpreter")
def test_gpu_implementations_are_refused_on_a_cpu(operation: str, name: str) -> None:
    """The error is a sentence with a remedy."""
    with pytest.raises(UserError, match=f"{operation} is '{name}', but .* the device is the CPU; write {operation} ="):
        choose_implementation(operation, name, CPU)


def test_triton_runs_on_a_cpu_in_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the interpreter turned on, Triton is available on a CPU."""
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert choose_implementation("rms_norm", "triton", CPU).name == "triton"
