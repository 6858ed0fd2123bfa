"""Choosing implementations by name."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from drawloom.components.kernels.auto import AutoKernels
from drawloom.components.kernels.choosing import OPERATIONS
from drawloom.components.ports.data import IGNORE_INDEX
from drawloom.components.ports.kernels import Kernels
from drawloom.graph import UserError
from drawloom.graph.project import Project
from drawloom.graph.registry.registry import read_spec
from drawloom.graph.types.port_match import find_mismatches
from drawloom.kernels.attention.eager import attention_eager, create_causal_document_mask
from drawloom.kernels.attention.options import AttentionOptions
from drawloom.kernels.cross_entropy.eager import linear_cross_entropy_eager
from drawloom.kernels.gates.eager import geglu_eager, oss_swiglu_halves_eager, swiglu_eager, swiglu_halves_eager
from drawloom.kernels.grouped_gemm.eager import add_expert_bias_eager, grouped_gemm_eager
from drawloom.kernels.linear import embedding_eager, linear_eager
from drawloom.kernels.moe.eager import moe_permute_eager, moe_routes_eager, moe_unpermute_eager
from drawloom.kernels.rms_norm.eager import add_rms_norm_eager, rms_norm_eager
from drawloom.kernels.rope.eager import qk_norm_rope_eager, rope_eager
from support.exchanges import Exchange, ThreadPart, run_threads
from support.kernels import DEVICE
from support.qwen3 import cpu_kernels, kernels_on


@pytest.mark.parametrize("port", [Kernels, Kernels])
def test_auto_fits_its_ports(port: type) -> None:
    """The component keeps the contracts for both kinds of kernels."""
    assert find_mismatches(AutoKernels, port) == []


def test_each_operation_is_a_setting() -> None:
    """A recipe names an implementation by the operation's own name, and leaves it to us by default."""
    fields = read_spec("kernels.auto", AutoKernels).fields
    settings = {name: field.default for name, field in fields.items() if name not in ("device", "filter_eps")}
    assert settings == dict.fromkeys(OPERATIONS, "auto")


def test_settings_name_exactly_the_implementations() -> None:
    """A recipe can write exactly the names of implementations, and auto."""
    for name, field in read_spec("kernels.auto", AutoKernels).fields.items():
        if name in OPERATIONS:
            assert set(field.type.__args__) == {"auto", *OPERATIONS[name].implementations}


def same(actual: Any, expected: Any) -> bool:
    """Whether tensors, or tuples of them, are bitwise equal."""
    if isinstance(actual, Tensor):
        return torch.equal(actual, expected)
    return all(same(ours, theirs) for ours, theirs in zip(actual, expected, strict=True))


@pytest.mark.parametrize("choice", ["auto", "eager"])
def test_operations_are_the_eager_ones(choice: Any) -> None:
    """On a CPU each operation is its eager implementation, whichever way it is chosen."""
    kernels = cpu_kernels(**dict.fromkeys(OPERATIONS, choice))
    kernels.open()
    x, weight = torch.randn(2, 3, 4, 8), torch.randn(8)
    cos, sin = torch.rand(2, 2, 3, 4)
    documents, targets = torch.zeros(2, 3, dtype=torch.int64), torch.tensor([1, 0, IGNORE_INDEX])
    assert same(kernels.linear(x, x[0, 0]), linear_eager(x, x[0, 0]))
    assert same(kernels.embedding(targets[:2], x[0, 0]), embedding_eager(targets[:2], x[0, 0]))
    assert same(kernels.rms_norm(x, weight, 0.1), rms_norm_eager(x, weight, 0.1))
    assert same(kernels.add_rms_norm(x, -2 * x, weight, 0.1), add_rms_norm_eager(x, -2 * x, weight, 0.1))
    assert same(kernels.swiglu(x, -x), swiglu_eager(x, -x))
    assert same(kernels.swiglu(x, -x, cos), swiglu_eager(x, -x, cos))
    assert same(kernels.geglu(x, -x), geglu_eager(x, -x))
    assert same(kernels.rope(x, cos, sin), rope_eager(x, cos, sin))
    arguments = x, x[:, :, :2], weight, weight + 1, 0.1, cos, sin
    assert same(kernels.qk_norm_rope(*arguments), qk_norm_rope_eager(*arguments))
    mask = kernels.attention_mask(documents)
    assert same(mask, create_causal_document_mask(documents))
    assert same(kernels.attention(x, x, x, mask), attention_eager(x, x, x, mask))
    inputs = x[0, :, 0], x[0, 0], targets
    assert same(kernels.linear_cross_entropy(*inputs), linear_cross_entropy_eager(*inputs))
    weighted, _ = kernels.linear_cross_entropy(*inputs, torch.full((3,), 0.5))
    assert same(weighted, linear_cross_entropy_eager(*inputs)[0] / 2) and weighted[2] == 0


def test_operations_of_experts_are_the_eager_ones() -> None:
    """On a CPU, operations of experts equal the eager implementations."""
    kernels = cpu_kernels()
    x, weight, probabilities = torch.randn(5, 8), torch.randn(3, 8, 6), torch.rand(5, 2)
    expert_indices = torch.randint(-1, 3, (5, 2))
    routes = kernels.moe_routes(expert_indices, 3)
    known = moe_routes_eager(expert_indices, 3)
    assert same(routes, known)
    rows = kernels.moe_permute(x, probabilities, routes)
    assert same(rows, moe_permute_eager(x, probabilities, known))
    assert same(kernels.swiglu_halves(*rows), swiglu_halves_eager(*rows))
    assert same(kernels.oss_swiglu_halves(*rows, 1.7, 2.0), oss_swiglu_halves_eager(rows[0], rows[1], 1.7, 2.0))
    product = kernels.grouped_gemm(rows[0], weight, routes[2])
    assert same(product, grouped_gemm_eager(rows[0], weight, known.offsets))
    biases, scale = torch.randn(3, 6), torch.rand(len(product))
    biased = kernels.add_expert_bias(product, biases, routes[2], scale)
    assert same(biased, add_expert_bias_eager(product, biases, known.offsets, scale))
    assert same(kernels.moe_unpermute(product, routes), moe_unpermute_eager(product, known))


def test_the_cut_loss_uses_the_filter_of_the_recipe() -> None:
    """Without a filter it is exact."""
    torch.manual_seed(0)  # in about one of 75 draws, every tile has a gradient above the threshold
    hidden = torch.randn(9, 16, device=DEVICE, requires_grad=True)
    weight = torch.randn(300, 16, device=DEVICE)
    targets = torch.zeros(9, dtype=torch.int64, device=DEVICE)  # in one of three tiles of words
    targets[3] = IGNORE_INDEX
    exact, cut, filtered = (
        kernels_on(DEVICE, linear_cross_entropy=name, filter_eps=least).linear_cross_entropy(hidden, weight, targets)[0]
        for name, least in (("eager", 0.0), ("cut", 0.0), ("cut", 0.9))
    )
    torch.testing.assert_close(cut, exact)
    torch.testing.assert_close(filtered, exact)
    grads = [torch.autograd.grad(losses.sum(), hidden)[0] for losses in (exact, cut, filtered)]
    torch.testing.assert_close(grads[0], grads[1])
    assert not torch.allclose(grads[0], grads[2])


def test_triton_on_a_cpu_is_refused_at_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes before any data is read or a model is built."""
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(UserError, match=r"kernels\.auto: swiglu is 'triton', but Triton runs on GPUs"):
        cpu_kernels(swiglu="triton").open()


def test_ranks_that_share_rows_gather_keys_and_values_of_different_widths() -> None:
    """With context parallelism, windows, options and sinks, two ranks together have the result of whole rows."""
    kernels, options, sinks = cpu_kernels(), AttentionOptions(0.3, 2.0), torch.randn(4)
    q, k, v = torch.randn(2, 8, 4, 6), torch.randn(2, 8, 2, 6), torch.randn(2, 8, 2, 5)
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2], [0] * 8])
    exchange = Exchange(torch.tensor([0, 1, 6, 7]), torch.tensor([2, 3, 4, 5]))

    def attend(rank: int) -> Tensor:
        part = ThreadPart(exchange, rank)
        mask = kernels.attention_mask(documents[:, part.token_indices], 3, part)
        return kernels.attention(
            q[:, part.token_indices], k[:, part.token_indices], v[:, part.token_indices], mask, options, sinks
        )

    parts = run_threads(attend)
    whole = kernels.attention(q, k, v, kernels.attention_mask(documents, 3), options, sinks)
    for part, places in zip(parts, exchange.token_indices, strict=True):
        torch.testing.assert_close(part, whole[:, places])


def problems(*words: str) -> list[str]:
    project = Project.from_package("drawloom")
    return [str(problem) for problem in project.graph(project.load("first_run", (), words)).problems]


@pytest.mark.parametrize("choice", ["rms_norm=triton", "attention=flex", "linear_cross_entropy=cut"])
def test_check_refuses_gpu_kernels_on_a_cpu(choice: str) -> None:
    """If the recipe's device is the CPU, a setting for GPUs is a problem at its place."""
    (problem,) = problems("device.kind=cpu", f"kernels.{choice}")
    name = choice.partition("=")[2]
    assert f"[kernels] '{name}' runs on GPUs, and the device is the CPU; write 'auto' or 'eager'" in problem
    assert problems(f"kernels.{choice}") == []


def test_explain_shows_the_choices_of_auto() -> None:
    """It gives the reasons too; operations chosen by the recipe are among the settings already."""
    project = Project.from_package("drawloom")
    graph = project.graph(project.load("first_run", (), ("device.kind=cpu", "kernels.rope=eager")))
    notes = list(AutoKernels.notes(graph.view("kernels")))
    assert "rms_norm: auto is eager, for the device is the CPU" in notes
    assert not [note for note in notes if note.startswith("rope:")]


def test_eager_kernels_do_without_triton() -> None:
    """Importing the kernels' component, and running the eager ones, imports no triton, nor needs it to be there."""
    code = """
import sys
sys.modules["triton"] = None  # importing it fails
import torch
from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.kernels.auto import AutoKernels
kernels = AutoKernels(device=ComputeDevice(kind="cpu"))
kernels.open()
x = torch.randn(2, 3, 4, 8, requires_grad=True)
kernels.swiglu(kernels.rms_norm(x, torch.ones(8), 1e-6), x).sum().backward()
"""
    path = os.pathsep.join(path for path in sys.path if path)  # wherever this process found its packages
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": path})
