"""What only a GPU can show of the kernels: great sizes, graphs, and that nothing waits. It takes about 60 GiB."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from drawloom.kernels.cut_cross_entropy import Cut
from drawloom.kernels.grouped_gemm import grouped_gemm_torch
from drawloom.kernels.moe_routes import moe_routes_eager
from drawloom.kernels.rms_norm import rms_norm_eager
from drawloom.kernels.rope import rope_eager
from drawloom.kernels.rope_frequencies import rope_angles
from drawloom.kernels.stochastic_adamw import StochasticAdamwEager, Trained, numbers_of
from drawloom.kernels.stochastic_copy import stochastic_copy_eager
from drawloom.kernels.swiglu import swiglu_eager
from drawloom.kernels.triton.cut_cross_entropy import cut_cross_entropy_triton
from drawloom.kernels.triton.grouped_gemm import grouped_gemm_triton
from drawloom.kernels.triton.linear_cross_entropy import linear_cross_entropy_triton
from drawloom.kernels.triton.moe_permute import moe_permute_triton, moe_unpermute_triton
from drawloom.kernels.triton.moe_routes import moe_routes_triton
from drawloom.kernels.triton.qk_norm_rope import qk_norm_rope_triton
from drawloom.kernels.triton.rms_norm import add_rms_norm_triton, rms_norm_triton
from drawloom.kernels.triton.rope import rope_triton
from drawloom.kernels.triton.stochastic_adamw import StochasticAdamwTriton
from drawloom.kernels.triton.stochastic_copy import stochastic_copy_triton
from drawloom.kernels.triton.swiglu import swiglu_triton

pytestmark = pytest.mark.gpu

GPU: Any = {"device": "cuda", "dtype": torch.bfloat16}
WIDTH = 4096
ROWS = 2**31 // WIDTH + 5
"""A little more than 2^31 elements; the last rows lie beyond."""

LAST = slice(-5, None)
CLOSE: Any = {"atol": 0.02, "rtol": 0.02}


@pytest.fixture(autouse=True)
def room() -> Iterator[None]:
    """Each test begins and ends with an empty device."""
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


def filled(*shape: int) -> Tensor:
    """Numbers at the end of a great tensor, and none in the rest of it: what is beyond is what counts."""
    made = torch.zeros(shape, **GPU)
    made[LAST] = torch.randn(made[LAST].shape, **GPU)
    return made


def test_swiglu_beyond_32_bits() -> None:
    """Results and gradients at the end of great tensors are right, contiguous or not."""
    gate, up = filled(ROWS, WIDTH).requires_grad_(), filled(ROWS, WIDTH).requires_grad_()
    found = swiglu_triton(gate, up)
    small = [x.detach()[LAST].requires_grad_() for x in (gate, up)]
    expected = swiglu_eager(*small)
    torch.testing.assert_close(found[LAST], expected, **CLOSE)
    grads = torch.autograd.grad(found, (gate, up), torch.ones_like(found))
    for ours, theirs in zip(grads, torch.autograd.grad(expected.sum(), small), strict=True):
        torch.testing.assert_close(ours[LAST], theirs, **CLOSE)


def test_rms_norm_beyond_32_bits() -> None:
    """The same for the norm, whose weight's gradient sums over all rows."""
    x, weight = filled(ROWS, WIDTH).requires_grad_(), torch.randn(WIDTH, **GPU).requires_grad_()
    found = rms_norm_triton(x, weight, 1e-6)
    small = x.detach()[LAST].requires_grad_()
    expected = rms_norm_eager(small, weight, 1e-6)
    torch.testing.assert_close(found[LAST], expected, **CLOSE)
    grads = torch.autograd.grad(found, (x, weight), torch.ones_like(found))
    exact = torch.autograd.grad(expected.sum(), (small, weight))
    torch.testing.assert_close(grads[0][LAST], exact[0], **CLOSE)
    torch.testing.assert_close(grads[1], exact[1], atol=0.1, rtol=0.02)


def test_rope_beyond_32_bits() -> None:
    """The same for rotations, of which the last are in the last heads of the last positions."""
    length = ROWS
    x = filled(length, 32, 128).unsqueeze(0)
    cos, sin = rope_angles(torch.arange(length, device="cuda").unsqueeze(0), 128, 1e6)
    found = rope_triton(x, cos, sin)
    expected = rope_eager(x[:, LAST], cos[:, LAST], sin[:, LAST])
    torch.testing.assert_close(found[:, LAST], expected, **CLOSE)


def test_rounding_beyond_32_bits() -> None:
    """Noise belongs to the element's place also there; the step changes what is there."""
    count, tail = 2**31 + 4096, 4096
    source = torch.randn(tail, device="cuda")
    great = torch.zeros(count, device="cuda")
    great[-tail:] = source
    found, expected = torch.zeros(count, **GPU), torch.zeros(tail, **GPU)
    stochastic_copy_triton(found, great, 3, 4)
    stochastic_copy_eager(expected, source, 3, 4, count - tail)
    assert torch.equal(found[-tail:], expected)
    del great
    kept = [torch.zeros(count, **GPU) for _ in "ms"]
    StochasticAdamwTriton([Trained(found, kept[0], kept[1], 0.1, 9)]).step(
        [torch.ones(count, **GPU)], numbers_of(1e-2, (0.9, 0.95), 1e-8, 1), 1
    )
    small = [torch.zeros(tail, **GPU) for _ in "ms"]
    StochasticAdamwEager([Trained(expected, small[0], small[1], 0.1, 9, count - tail)]).step(
        [torch.ones(tail, **GPU)], numbers_of(1e-2, (0.9, 0.95), 1e-8, 1), 1
    )
    assert torch.equal(found[-tail:], expected)
    assert torch.equal(kept[1][-tail:], small[1])


def test_experts_beyond_32_bits() -> None:
    """Rows of tokens, and their products, are right where their offsets need more than 32 bits."""
    tokens, choices = ROWS // 8 + 1, 8
    x = filled(tokens, WIDTH)
    experts_of = torch.arange(choices, device="cuda").expand(tokens, choices)
    routes, probabilities = moe_routes_triton(experts_of, choices), torch.ones(tokens, choices, device="cuda")
    rows, _ = moe_permute_triton(x, probabilities, routes)
    assert rows.numel() > 2**31
    assert torch.equal(rows[LAST], x[LAST])
    back = moe_unpermute_triton(rows, routes)
    torch.testing.assert_close(back[LAST], 8 * x[LAST], **CLOSE)
    weight = torch.randn(choices, WIDTH, 64, **GPU) / 64
    product = grouped_gemm_triton(rows, weight, routes.offsets)
    torch.testing.assert_close(product[LAST], x[LAST] @ weight[-1], **CLOSE)


def test_losses_beyond_32_bits() -> None:
    """Words whose rows of the weight lie there have their logits and their gradients."""
    words, width = 2**31 // 2048 + 100, 2048
    weight = torch.zeros(words, width, **GPU)
    weight[-3:] = torch.randn(3, width, **GPU) / 32
    weight.requires_grad_()
    hidden, targets = torch.randn(16, width, **GPU).requires_grad_(), torch.full((16,), words - 1, device="cuda")
    for compute in (
        linear_cross_entropy_triton,
        cut_cross_entropy_triton,
        lambda h, w, t: cut_cross_entropy_triton(h, w, t, Cut(filter_eps=1e-7)),
    ):
        losses = compute(hidden, weight, targets)
        logits = (hidden @ weight[-3:].T).float()
        others = torch.tensor(words - 3.0, device="cuda").log().expand(16, 1)
        exact = torch.cat((logits, others), 1).logsumexp(1) - logits[:, 2]
        torch.testing.assert_close(losses, exact, atol=0.02, rtol=0.01)
        (grad,) = torch.autograd.grad(losses.sum(), weight)
        torch.testing.assert_close(grad[-1].float(), -hidden.sum(0).float(), atol=0.1, rtol=0.05)


def path(x: Tensor, weight: Tensor, down: Tensor, experts_of: Tensor, gemm: Callable[..., Tensor]) -> Tensor:
    """A layer of experts, from choices to what comes out."""
    routes = moe_routes_triton(experts_of, len(weight))
    probabilities = torch.ones(experts_of.shape, device="cuda") / experts_of.shape[1]
    rows, of_rows = moe_permute_triton(x, probabilities, routes)
    made = gemm(rows, weight, routes.offsets)
    gate, up = made.chunk(2, -1)
    gated = swiglu_triton(gate, up, of_rows)
    return moe_unpermute_triton(gemm(gated, down, routes.offsets), routes)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("gemm", [grouped_gemm_triton, grouped_gemm_torch])
def test_experts_never_wait(gemm: Callable[..., Tensor]) -> None:
    """Forwards and backwards, a layer of experts asks nothing of the device; some experts have no token."""
    x, weight = torch.randn(300, 256, **GPU).requires_grad_(), torch.randn(16, 256, 256, **GPU).requires_grad_()
    down, experts_of = torch.randn(16, 128, 256, **GPU).requires_grad_(), torch.randint(3, 9, (300, 4), device="cuda")
    torch.autograd.grad(path(x, weight, down, experts_of, gemm).sum(), (x, weight, down))  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        grads = torch.autograd.grad(path(x, weight, down, experts_of, gemm).sum(), (x, weight, down))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(grad.isfinite().all() for grad in grads)


def test_routes_are_those_of_the_eager_twin() -> None:
    """At the size of a real layer."""
    experts_of = torch.rand(32768, 128, device="cuda").topk(8, 1).indices
    found, expected = moe_routes_triton(experts_of, 128), moe_routes_eager(experts_of, 128)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def calls() -> dict[str, Callable[[], Any]]:
    """Every kernel, forwards and backwards, as a call that can be recorded."""
    x, weight = torch.randn(64, 256, **GPU).requires_grad_(), torch.randn(256, **GPU).requires_grad_()
    q, k = torch.randn(2, 32, 4, 64, **GPU).requires_grad_(), torch.randn(2, 32, 2, 64, **GPU).requires_grad_()
    of_q, of_k = torch.randn(64, **GPU).requires_grad_(), torch.randn(64, **GPU).requires_grad_()
    angles = rope_angles(torch.arange(32, device="cuda").expand(2, 32), 64, 1e4)
    matrix, targets = torch.randn(1000, 256, **GPU).requires_grad_(), torch.randint(1000, (64,), device="cuda")
    up, down = torch.randn(4, 256, 512, **GPU).requires_grad_(), torch.randn(4, 256, 256, **GPU).requires_grad_()
    experts_of = torch.randint(-1, 4, (64, 2), device="cuda")
    kept = [torch.zeros(256, **GPU) for _ in "wms"]
    stepper = StochasticAdamwTriton([Trained(kept[0], kept[1], kept[2], 0.1, 1)])
    ones, copy = torch.ones(256, **GPU), torch.zeros(64, 256, **GPU)

    def grad(result: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        results = [result] if isinstance(result, Tensor) else list(result)
        return torch.autograd.grad(results, inputs, [torch.ones_like(each) for each in results])

    return {
        "rms_norm": lambda: grad(rms_norm_triton(x, weight, 1e-6), x, weight),
        "add_rms_norm": lambda: grad(add_rms_norm_triton(x, x, weight, 1e-6), x, weight),
        "swiglu": lambda: grad(swiglu_triton(x, x), x),
        "rope": lambda: grad(rope_triton(q, *angles), q),
        "qk_norm_rope": lambda: grad(qk_norm_rope_triton(q, k, of_q, of_k, 1e-6, *angles), q, k, of_q, of_k),
        "linear_cross_entropy": lambda: grad(linear_cross_entropy_triton(x, matrix, targets).sum(), x, matrix),
        "cut": lambda: grad(cut_cross_entropy_triton(x, matrix, targets).sum(), x, matrix),
        "filtered": lambda: grad(cut_cross_entropy_triton(x, matrix, targets, Cut(filter_eps=1e-4)).sum(), x, matrix),
        "experts": lambda: grad(path(x, up, down, experts_of, grouped_gemm_triton), x, up, down),
        "stochastic_adamw": lambda: stepper._launches[0][1].run([ones]),
        "stochastic_copy": lambda: stochastic_copy_triton(copy, x.detach().float(), 1, 2),
    }


NAMES = ["rms_norm", "add_rms_norm", "swiglu", "rope", "qk_norm_rope", "linear_cross_entropy", "cut", "filtered"]


@pytest.mark.parametrize("name", [*NAMES, "experts", "stochastic_adamw", "stochastic_copy"])
def test_can_be_recorded_in_a_graph(name: str) -> None:
    """Recorded and run again, an operation gives what it gives otherwise."""
    call = calls()[name]
    expected = call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    graph.replay()
    torch.cuda.synchronize()
    if isinstance(found, tuple):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", [*NAMES, "experts"])
def test_same_bits_each_time(name: str) -> None:
    """Gradients are bitwise the same in many runs."""
    call: Any = calls()[name]
    first = call()
    for _ in range(10):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(call(), first, strict=True))
