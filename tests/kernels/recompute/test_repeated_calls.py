"""Recomputation in the backward pass: the same bits from less memory."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from drawloom.components.kernels.auto import AutoKernels
from drawloom.kernels.linear import linear_eager
from drawloom.kernels.recompute.marks import call_recomputable
from drawloom.kernels.recompute.repeated_calls import call_with_recomputation
from drawloom.kernels.recompute.selective import Selective
from support.kernels import DEVICE
from support.qwen3 import kernels_on

WIDTH = 16


@pytest.fixture(scope="module", autouse=True)
def _context_of_the_backward_thread() -> None:
    """Bind a CUDA context to torch's backward thread, which does not do it by itself: cuBLAS warns (torch 2.11)."""
    torch.autograd.backward(2 * torch.ones((), device=DEVICE, requires_grad=True))


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return random tensors that need gradients."""
    torch.manual_seed(0)
    return [torch.randn(shape, device=DEVICE, dtype=dtype).requires_grad_() for shape in shapes]


def count_kept_bytes(forward: Callable[[], Tensor]) -> int:
    """Return the bytes that a forward pass allocates on a CPU and does not free, as the profiler counts them."""
    forward()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as running:
        output = forward()
    kept: int = sum(event.self_cpu_memory_usage for event in running.key_averages())
    del output
    return kept


def grads_of(output: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Return gradients of leaves for a random output gradient."""
    torch.manual_seed(1)
    return list(torch.autograd.grad(output, leaves, torch.randn_like(output)))


def same(actual: list[Tensor], expected: list[Tensor]) -> bool:
    """Return whether tensors are bitwise equal."""
    return all(torch.equal(result, reference) for result, reference in zip(actual, expected, strict=True))


def mlp(x: Tensor, up: Tensor, down: Tensor, drop: float = 0.0) -> Tensor:
    """Return an output with products of both kinds, and an activation and dropout between them."""
    return F.dropout(F.gelu(linear_eager(x, up)), drop) @ down


def test_a_rerun_call_has_the_same_bits_and_keeps_its_arguments() -> None:
    """Gradients and later random numbers are the same as without recomputation, also with dropout."""
    x, up, down = leaves = tensors((64, WIDTH), (4 * WIDTH, WIDTH), (4 * WIDTH, WIDTH))
    outputs = []
    for run in (lambda: mlp(x, up, down, 0.5), lambda: call_with_recomputation(mlp, x, up, down, drop=0.5)):
        torch.manual_seed(2)
        output = run()
        after = torch.rand(3)  # random numbers after the forward pass, and after the backward pass, are the same, too
        outputs.append([output, after, *grads_of(output, leaves), torch.rand(3)])
    assert same(outputs[1], outputs[0])


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the profiler counts the CPU's memory")
def test_a_rerun_call_keeps_only_its_result() -> None:
    """The forward pass keeps the bytes of its output, and not the tensors inside, which are four times as wide."""
    x, up, down = tensors((256, WIDTH), (4 * WIDTH, WIDTH), (4 * WIDTH, WIDTH))
    assert count_kept_bytes(lambda: mlp(x, up, down)) > 8 * x.nbytes
    # The state of the generator takes 5 KB.
    assert x.nbytes <= count_kept_bytes(lambda: call_with_recomputation(mlp, x, up, down)) < 1.5 * x.nbytes


def test_a_rerun_uses_the_autocast_of_the_forward_pass() -> None:
    """A call within autocast is rerun within it, although the backward pass runs outside."""
    x, weight = tensors((4, WIDTH), (WIDTH, WIDTH))
    actual = []
    for run in (lambda f, *given: f(*given), call_with_recomputation):
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            output = run(lambda x, weight: torch.tanh(x @ weight).float(), x, weight)
        actual.append(grads_of(output, [x, weight]))
    assert same(actual[1], actual[0])


def test_an_argument_changed_in_place_is_an_error() -> None:
    """Recomputing from changed values would give wrong gradients in silence, so it is refused."""
    x, weight = tensors((4, WIDTH), (WIDTH, WIDTH))
    inputs = x * 2
    output = call_with_recomputation(lambda x: torch.tanh(x @ weight), inputs)
    inputs.detach().add_(1)
    with pytest.raises(RuntimeError, match="changed in place after the forward pass"):
        output.sum().backward()


@pytest.mark.parametrize("change", ["shape", "number"])
def test_a_rerun_that_saves_other_tensors_is_an_error(change: str) -> None:
    """Tensors of other shapes, or fewer tensors, are refused."""
    (x,) = tensors((4, 6))
    times = 0

    def changing(x: Tensor) -> Tensor:
        nonlocal times
        times += 1
        if times == 1:
            return x.exp().sin()
        return x.view(6, 4).exp() if change == "shape" else x.exp()

    output = call_with_recomputation(changing, x)
    with pytest.raises(RuntimeError, match="must do the same in both passes"):
        output.sum().backward()


def test_nothing_outlives_the_backward_pass() -> None:
    """The backward pass frees the tensors of a recomputation while it runs, by reference counts alone."""
    x, up, down = tensors((4, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH))
    seen: list[Any] = []

    def forward_with_reference(x: Tensor) -> Tensor:
        inside = x @ up
        seen.append(weakref.ref(inside))
        return inside.tanh() @ down

    gc.disable()
    try:
        output = call_with_recomputation(forward_with_reference, x * 1)
        output.sum().backward()
        del output
        assert len(seen) == 2 and [reference() for reference in seen] == [None, None]
    finally:
        gc.enable()


def square_of(x: Tensor) -> Tensor:
    """Square x: a cheap operation, which saves its input and not its result."""
    return x * x


def test_results_of_cheap_operations_are_recomputed_once() -> None:
    """Three products that read one result, also through a view, recompute it once, with the same bits."""
    x, weight = tensors((2, 4, WIDTH), (WIDTH, WIDTH))
    calls = []

    def square_and_count(x: Tensor) -> Tensor:
        calls.append(1)
        return square_of(x)

    def run() -> Tensor:
        squares = call_recomputable(square_and_count, x)
        output: Tensor = (
            (squares @ weight).sum() + linear_eager(squares, weight).sin() + squares.flatten(0, 1).t().sin().sum()
        )
        return output

    plain = run()
    expected = grads_of(plain, [x, weight])
    calls.clear()
    with Selective():
        output = run()
    actual = grads_of(output, [x, weight])
    assert torch.equal(output, plain) and same(actual, expected)
    assert len(calls) == 2


def test_a_result_that_is_changed_in_place_is_kept() -> None:
    """A result that was changed in place is saved instead of recomputed."""
    x, weight = tensors((4, WIDTH), (WIDTH, WIDTH))

    def run() -> Tensor:
        squares: Tensor = call_recomputable(square_of, x)
        squares.add_(1)
        return squares @ weight

    expected = grads_of(run(), [x, weight])
    with Selective():
        output = run()
    assert same(grads_of(output, [x, weight]), expected)


def test_a_reused_address_is_not_the_old_result() -> None:
    """A tensor at the address of a freed result is kept."""
    (x,) = tensors((64, WIDTH))
    with Selective():
        first = call_recomputable(square_of, x)
        address = first.data_ptr()
        del first
        actual = []
        for _ in range(20):
            inside = x + 1
            if inside.data_ptr() == address:
                actual.append(inside.exp().sin())
            else:
                actual.append((x + 1).exp().sin())
            del inside
    expected = torch.autograd.grad((x + 1).exp().sin().sum(), x)[0]
    assert all(torch.equal(torch.autograd.grad(output.sum(), x)[0], expected) for output in actual)


def block(kernels: AutoKernels, x: Tensor, w: dict[str, Tensor], shared: Any) -> Tensor:
    """Compute a layer with a dense and a sparse half, which calls the kernels like a model's layers."""
    cos, sin, mask, rows = shared
    heads = (*x.shape[:2], -1, WIDTH)
    normed = kernels.rms_norm(x, w["first"], 1e-6)
    q, k, v = (kernels.linear(normed, w[name]).view(heads) for name in "qkv")
    q, k = kernels.qk_norm_rope(q, k, w["of_q"], w["of_k"], 1e-6, cos, sin)
    mixed = kernels.linear(kernels.attention(q, k, v, mask).flatten(2), w["out"])
    normed, x = kernels.add_rms_norm(mixed, x, w["second"], 1e-6)
    inside = kernels.swiglu(kernels.linear(normed, w["gate"]), kernels.linear(normed, w["up"]))
    copies, scale = kernels.moe_permute(normed.flatten(0, 1), rows[0], rows[1])
    both = kernels.grouped_gemm(copies, w["experts"], rows[1][2])
    summed = kernels.moe_unpermute(
        kernels.grouped_gemm(kernels.swiglu_halves(both, scale), w["down"], rows[1][2]), rows[1]
    )
    return x + kernels.linear(inside, w["low"]) + summed.view_as(x)


@pytest.mark.parametrize(("choice", "dtype"), [("eager", torch.float32), ("triton", torch.bfloat16)])
def test_a_recomputed_layer_has_the_same_bits(choice: Any, dtype: torch.dtype) -> None:
    """Selective recomputation and rerun layers are bitwise equal to a plain run, in both implementations."""
    names = ("rms_norm", "add_rms_norm", "swiglu", "swiglu_halves", "qk_norm_rope", "moe_permute", "moe_unpermute")
    kernels = kernels_on(DEVICE, **dict.fromkeys(names, choice), attention="eager", grouped_gemm="eager")
    kernels.open()
    square, inner = (2 * WIDTH, 2 * WIDTH), (3 * WIDTH, 2 * WIDTH)
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("first", "second"), (2 * WIDTH,))
    shapes |= dict.fromkeys(("of_q", "of_k"), (WIDTH,)) | dict.fromkeys(("q", "k", "v", "out"), square)
    shapes |= {"gate": inner, "up": inner, "low": inner[::-1]}
    shapes |= {"experts": (3, 2 * WIDTH, 2 * WIDTH), "down": (3, WIDTH, 2 * WIDTH)}
    x, *weights = tensors((2, 5, 2 * WIDTH), *shapes.values(), dtype=dtype)
    w = dict(zip(shapes, weights, strict=True))
    routes = kernels.moe_routes(torch.randint(3, (10, 2), device=DEVICE), 3)
    angles = torch.rand(2, 2, 5, WIDTH // 2, device=DEVICE)
    mask = kernels.attention_mask(torch.zeros(2, 5, dtype=torch.int64, device=DEVICE))
    shared = *angles, mask, (torch.rand(10, 2, device=DEVICE), routes)

    def run() -> Tensor:
        return block(kernels, x * 1, w, shared)

    output = run()
    actual = [output, *grads_of(output, [x, *weights])]
    for policy in (Selective, None):
        if policy is None:
            again = call_with_recomputation(block, kernels, x * 1, w, shared)
        else:
            with policy():
                again = run()
        assert same([again, *grads_of(again, [x, *weights])], actual)


class Gate(nn.Module):
    """A layer that does not use the kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sigmoid(self.linear(x))


def test_a_compiled_call_can_be_rerun() -> None:
    """A compiled function runs twice, and has the same bits."""
    torch.manual_seed(0)
    layer = Gate().to(DEVICE)
    compiled: Any = torch.compile(layer, backend="aot_eager")
    (x,) = tensors((4, WIDTH))
    expected = grads_of(compiled(x), [x, *layer.parameters()])
    assert same(grads_of(call_with_recomputation(compiled, x), [x, *layer.parameters()]), expected)
    with Selective():
        output = compiled(x)
    assert same(grads_of(output, [x, *layer.parameters()]), expected)
