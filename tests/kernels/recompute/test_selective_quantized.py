"""Inputs of norms and gates in 8 bits, against float64 at independently rounded inputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drawloom.kernels.float8.eager import EAGER
from drawloom.kernels.float8.experts import experts_float8
from drawloom.kernels.float8.linear import linear_float8, mlp_float8, rms_norm_float8
from drawloom.kernels.recompute.marks import accept_rounded_inputs
from drawloom.kernels.recompute.saved_tensors import get_wrapper_of_saved_variable
from drawloom.kernels.recompute.selective import Quantized
from drawloom.kernels.results import Routes
from support import pipelines
from support.pipelines import assert_same_steps
from support.processes import run_ranks
from support.qwen3 import cpu_kernels

EPS = 1e-6
UNIT = 2.0**-4
"""Largest relative rounding error of e4m3, which has 3 bits of fraction."""

KERNELS = cpu_kernels()


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def round_rows(x: Tensor) -> Tensor:
    """Return x (..., width) rounded to e4m3 with a power-of-two scale per row, so that the largest is at most 448."""
    scale = torch.exp2(torch.log2(448 / x.abs().amax(-1, keepdim=True)).floor())
    return (x * scale).float().to(torch.float8_e4m3fn).double() / scale


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def gradients(function: Callable[..., Tensor], *leaves: Tensor, quantized: bool) -> list[Tensor]:
    """Return the result, and the gradients of a fixed linear function of it."""
    torch.manual_seed(1)
    if quantized:
        with Quantized():
            y = function(*leaves)
    else:
        y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, torch.randn_like(y))]


def count_rounded(y: Tensor, shape: tuple[int, ...]) -> int:
    """Return how many rounded tensors with a shape an operation saved."""
    node: Any = y.grad_fn
    wrappers = filter(None, (get_wrapper_of_saved_variable(variable) for variable in node._raw_saved_tensors))
    return sum(not wrapper.is_unrounded and wrapper.get_or_recompute().shape == shape for wrapper in wrappers)


def network(x: Tensor, residual: Tensor, weight: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    normed, summed = KERNELS.add_rms_norm(x, residual, weight, EPS)
    inner = KERNELS.swiglu(KERNELS.linear(normed, gate), KERNELS.linear(normed, up))
    return summed + KERNELS.linear(inner, down)


def test_gradients_are_those_at_rounded_inputs() -> None:
    """
    The result is exact. A norm's and a gate's gradients, and the next layers' weight gradients, are float64's at inputs
    rounded by another formula; the norm divides by the exact root mean square.
    """
    leaves = draw(3, 5, 32), draw(3, 5, 32), draw(32), draw(48, 32), draw(48, 32), draw(32, 48)
    y, grad_x, _, grad_weight, grad_gate, grad_up, grad_down = gradients(network, *leaves, quantized=True)
    assert torch.equal(y, gradients(network, *leaves, quantized=False)[0])
    x, residual, weight, gate, up, down = (leaf.detach() for leaf in leaves)
    torch.manual_seed(1)
    grad = torch.randn_like(y)
    summed = x + residual
    exact_normed, normed = norm(summed, weight), norm(round_rows(summed), weight)
    both = [round_rows(exact_normed @ part.T).requires_grad_() for part in (gate, up)]
    inner = F.silu(both[0]) * both[1]
    grad_both = torch.autograd.grad(inner, both, grad @ down)
    grad_normed = grad_both[0] @ gate + grad_both[1] @ up
    rms = (summed.square().mean(-1, keepdim=True) + EPS).sqrt()
    unit, along = round_rows(summed) / rms, grad_normed * weight
    expected = grad + (along - unit * (along * unit).mean(-1, keepdim=True)) / rms
    close: Any = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(grad_x, expected, **close)
    torch.testing.assert_close(grad_weight, (grad_normed * unit).sum((0, 1)), **close)
    rows = normed.flatten(0, 1)
    torch.testing.assert_close(grad_gate, grad_both[0].flatten(0, 1).T @ rows, **close)
    torch.testing.assert_close(grad_up, grad_both[1].flatten(0, 1).T @ rows, **close)
    torch.testing.assert_close(grad_down, grad.flatten(0, 1).T @ inner.detach().flatten(0, 1), **close)


def test_errors_of_weight_gradients_are_bounded_by_the_format() -> None:
    """
    After a norm with inputs off by 2^-4, its outputs are off by (1 + 2^-4) / (1 - 2^-4) - 1; gradients of the weight
    add the errors of all tokens.
    """

    def function(x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
        return KERNELS.linear(KERNELS.rms_norm(x, scale, EPS), weight)

    leaves = draw(200, 32), draw(32), draw(16, 32)
    y, *_, rounded = gradients(function, *leaves, quantized=True)
    *_, exact = gradients(function, *leaves, quantized=False)
    torch.manual_seed(1)
    products = torch.randn_like(y).abs().T @ norm(leaves[0], leaves[1]).detach().abs()
    error = (rounded - exact).abs()
    assert error.max() > 0
    assert (error <= ((1 + UNIT) / (1 - UNIT) - 1) * products).all()


@pytest.mark.parametrize("gate", ["swiglu_halves", "geglu", "oss_swiglu_halves"])
def test_every_gate_rounds_its_inputs_once(gate: str) -> None:
    """Gradients equal those of a gate with rounded inputs, also if it saves views of one input."""

    def function(*tensors: Tensor) -> Tensor:
        more: list[Any] = [None, 1.7, 7.0] if gate == "oss_swiglu_halves" else []
        result: Tensor = getattr(KERNELS, gate)(*tensors, *more)
        return result

    leaves = [draw(4, 6, 32) for _ in range(2 if gate == "geglu" else 1)]
    _, *actual = gradients(function, *leaves, quantized=True)
    rounded = [round_rows(leaf.detach()).requires_grad_() for leaf in leaves]
    _, *expected = gradients(function, *rounded, quantized=False)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_attention_and_cross_entropy_see_their_own_inputs() -> None:
    """Both save exact results of norms, whose inputs are rounded, so that their gradients keep their bits."""
    tokens = torch.arange(12).view(2, 6) % 5

    def attend(x: Tensor, scale: Tensor) -> Tensor:
        q = KERNELS.rms_norm(x.view(2, 6, 2, 8), scale, EPS)
        q.retain_grad()
        seen.append(q)
        return KERNELS.attention(q, q, q, KERNELS.attention_mask(torch.zeros_like(tokens)))

    def lose(x: Tensor, scale: Tensor) -> Tensor:
        hidden = KERNELS.rms_norm(x.view(2, 6, 2, 8)[:, :, 0], scale, EPS)
        hidden.retain_grad()
        seen.append(hidden)
        return KERNELS.linear_cross_entropy(hidden, head, tokens).losses

    head = draw(5, 8)
    leaves = draw(2, 6, 16), draw(8)
    for function in (attend, lose):
        seen: list[Tensor] = []
        for quantized in (True, False):
            torch.manual_seed(1)
            with Quantized() if quantized else torch.enable_grad():
                y = function(*leaves)
            torch.autograd.backward(y, torch.randn_like(y))
        rounded, exact = (tensor.grad for tensor in seen)
        assert rounded is not None and exact is not None and torch.equal(rounded, exact)


def test_experts_in_float8_have_scales_that_fit_their_elements() -> None:
    """
    Tokens' elements and scales in float8 come from one rounding. If rounding a norm's input moves a token's largest
    number over a power of two, elements with the other scale would be off by a factor 2.
    """
    tokens, width, inner, experts = 64, 32, 16, 2
    kernels = KERNELS
    scale, gate_up, down = (
        draw(*shape).detach().bfloat16().requires_grad_()
        for shape in ((width,), (experts, 2 * inner, width), (experts, width, inner))
    )
    chosen = (torch.arange(tokens) % experts)[:, None]
    probabilities, routes = torch.ones(tokens, 1), kernels.moe_routes(chosen, experts)
    x = draw(tokens, width).detach().bfloat16().requires_grad_()

    def function(x: Tensor, scale: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        normed = kernels.rms_norm(x, scale, EPS)
        return experts_float8(EAGER, normed, probabilities, gate_up, down, Routes(*routes))

    rounded = gradients(function, x, scale, gate_up, down, quantized=True)
    exact = gradients(function, x, scale, gate_up, down, quantized=False)
    assert torch.equal(rounded[3], exact[3]) and torch.equal(rounded[4], exact[4])
    assert not torch.equal(rounded[1], exact[1])


def test_networks_in_float8_are_rounded_once_more() -> None:
    """
    The result is exact, gate's and up's results are kept in 8 bits, and gradients differ by a few roundings: no element
    meets the scale of another rounding.
    """
    shapes = (64, 32), (32,), (48, 32), (48, 32), (32, 48), (16, 32)
    leaves = [draw(*shape).detach().bfloat16().requires_grad_() for shape in shapes]
    counts: list[int] = []

    def function(x: Tensor, scale: Tensor, gate: Tensor, up: Tensor, down: Tensor, last: Tensor) -> Tensor:
        normed, _ = rms_norm_float8(EAGER, x, None, scale, EPS, False)
        with accept_rounded_inputs():
            y = mlp_float8(EAGER, normed, gate, up, down)
            counts.append(count_rounded(y, (64, 96)))
            return linear_float8(EAGER, KERNELS.rms_norm(y, scale, EPS), last)

    rounded = gradients(function, *leaves, quantized=True)
    exact = gradients(function, *leaves, quantized=False)
    assert torch.equal(rounded[0], exact[0])
    for one, other in zip(rounded[1:], exact[1:], strict=True):
        assert 0 < float((one - other).norm()) < 2 * UNIT * float(other.norm())
    assert counts == [1, 0]


CASES: list[pipelines.Case] = [
    *((name, 4, True, False, "smoothed") for name in ("one_f_one_b", "zero_bubble_v")),
    *(("one_f_one_b", 4, False, False, family) for family in ("gpt_oss", "qwen3_5")),
]


def test_shards_and_pipelines_round_alike() -> None:
    """Two pipelines of two shards have the losses and gradients of one process, with whole and split passes."""
    alone = pipelines.steps(CASES, layers=4, recompute=["quantized", "none"])
    rounded, exact = alone[: len(CASES)], alone[len(CASES) :]
    for one, other in zip(rounded, exact, strict=True):
        assert one["loss"] == other["loss"]
        whole = torch.cat([grad.flatten() for grad in other["grads"].values() if grad is not None])
        error = torch.cat([grad.flatten() for grad in one["grads"].values() if grad is not None]) - whole
        assert 0 < float(error.norm()) < UNIT * float(whole.norm())
    common: Any = "cpu", pipelines.FLOAT64, 1, 4, (4, 1), 0, ["quantized"]
    ranks = run_ranks(pipelines.steps, 4, CASES[:2], {"data_shard": 2}, *common, timeout=120)
    for number in range(2):
        assert_same_steps([rank[number] for rank in ranks], rounded[number])


@pytest.mark.soak
@pytest.mark.parametrize(
    ("sizes", "experts"), [({"tensor": 2}, 0), ({"context": 2}, 0), ({"data_shard": 2, "expert": 2}, 4)]
)
def test_other_meshes_round_by_their_own_scales(sizes: dict[str, int], experts: int) -> None:
    """Losses are those without a policy, and gradients within the format's error, if ranks split rows or tokens."""
    cases: list[pipelines.Case] = [("one_f_one_b", 4, True, False, "smoothed")]
    [exact] = pipelines.steps(cases, layers=4, lengths=(4, 4), experts=experts)
    common: Any = "cpu", pipelines.FLOAT64, 1, 4, (4, 4), experts, ["quantized"]
    ranks = [steps[0] for steps in run_ranks(pipelines.steps, 2, cases, sizes, *common, timeout=120)]
    assert sum(rank["loss"] for rank in ranks) == pytest.approx(exact["loss"], rel=1e-10)
    grads: dict[str, Any] = pipelines.assemble(ranks, "grads")
    names = [name for name, grad in exact["grads"].items() if grad is not None]
    whole, rounded = (torch.cat([part[name].flatten() for name in names]) for part in (exact["grads"], grads))
    assert 0 < float((rounded - whole).norm()) < UNIT * float(whole.norm())
