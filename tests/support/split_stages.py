"""Stages that are hard to split into two backward passes, each built from our linear layers or torch's."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from drawloom.kernels.linear import embedding_eager, linear_eager
from drawloom.kernels.recompute.repeated_calls import call_with_recomputation
from drawloom.kernels.rms_norm import rms_norm_eager

WIDTH = 6
Ops = Literal["ours", "torch"]
Forward = Callable[..., Any]


class Linear(nn.Linear):
    """A linear layer of ours."""

    def forward(self, x: Tensor) -> Tensor:
        return linear_eager(x, self.weight, self.bias)


class Cube(Function):
    """A foreign operation: it computes the gradients of both factors at once, whatever is needed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x @ weight) ** 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grad * 3 * (x @ weight) ** 2
        return grad @ weight.T, x.flatten(0, -2).T @ grad.flatten(0, -2)


def cube(x: Tensor, weight: Tensor) -> Tensor:
    """Return (x @ weight)^3."""
    return Cube.apply(x, weight)  # type: ignore[no-untyped-call, no-any-return]


class Stage(nn.Module):
    """Parameters and modules by name, with a function of them and the inputs."""

    def __init__(self, forward: Forward, **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._forward = forward

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        outputs = self._forward(self, *inputs)
        return outputs if isinstance(outputs, tuple) else (outputs,)


@attrs.frozen
class Parts:
    """A factory for a stage's parts, which multiplies by weights in one of two ways."""

    ops: Ops

    def linear(self, inputs: int = WIDTH, outputs: int = WIDTH, bias: bool = True) -> nn.Linear:
        return (Linear if self.ops == "ours" else nn.Linear)(inputs, outputs, bias)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        return linear_eager(x, weight) if self.ops == "ours" else x @ weight

    def embedding(self, tokens: Tensor, weight: Tensor) -> Tensor:
        return (embedding_eager if self.ops == "ours" else F.embedding)(tokens, weight)

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return (rms_norm_eager if self.ops == "ours" else _rms_norm)(x, weight, 1e-6)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*(shape or (WIDTH, WIDTH))) / WIDTH**0.5)


def _block(p: Parts) -> Stage:
    def forward(s: Any, x: Tensor) -> Tensor:
        q, k, v = s.qkv(p.rms_norm(x, s.scale)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + s.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + s.down(F.gelu(s.up(p.rms_norm(x, s.scale))))  # type: ignore[no-any-return]

    wide = 3 * WIDTH
    parts = {"qkv": p.linear(outputs=wide), "out": p.linear(), "up": p.linear(outputs=wide), "down": p.linear(wide)}
    return Stage(forward, scale=weight(WIDTH), **parts)


def _make_frozen(p: Parts) -> Stage:
    stage = Stage(lambda s, x: s.c(torch.relu(s.b(s.a(x)))), a=p.linear(), b=p.linear(), c=p.linear())
    stage.b.requires_grad_(False)
    stage.get_parameter("c.bias").requires_grad_(False)
    return stage


def _make_recomputed(p: Parts, use_reentrant: bool) -> Stage:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.c(checkpoint(lambda x: torch.tanh(s.b(torch.tanh(s.a(x)))), x, use_reentrant=use_reentrant))  # type: ignore[no-any-return]

    return Stage(forward, a=p.linear(), b=p.linear(), c=p.linear())


def _make_recomputed_twice(p: Parts) -> Stage:
    def inner(s: Any, x: Tensor) -> Tensor:
        return torch.tanh(s.b(checkpoint(lambda x: torch.tanh(s.a(x)), x, use_reentrant=False)))

    return Stage(lambda s, x: checkpoint(inner, s, x, use_reentrant=False), a=p.linear(), b=p.linear())


def _rerun(p: Parts) -> Stage:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.c(call_with_recomputation(lambda x: torch.tanh(s.b(F.dropout(torch.tanh(s.a(x))))), x))  # type: ignore[no-any-return]

    return Stage(forward, a=p.linear(), b=p.linear(), c=p.linear())


def _rerun_block(p: Parts) -> Stage:
    block = _block(p)
    block._forward = partial(call_with_recomputation, block._forward)
    return block


def _rerun_twice(p: Parts) -> Stage:
    def inner(s: Any, x: Tensor) -> Tensor:
        again = checkpoint(lambda x: torch.tanh(s.a(x)), x, use_reentrant=False)
        return torch.tanh(s.b(call_with_recomputation(lambda x: torch.tanh(s.a(x)), again)))

    return Stage(lambda s, x: call_with_recomputation(inner, s, x), a=p.linear(), b=p.linear())


def _make_offloaded(p: Parts) -> Stage:
    def forward(s: Any, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.numpy(force=True).copy(), torch.from_numpy):
            return s.b(s.a(x).tanh())  # type: ignore[no-any-return]

    return Stage(forward, a=p.linear(), b=p.linear())


def _make_changed_in_place(p: Parts) -> Stage:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.a(x)
        y[..., :3] = y[..., 3:] * 2
        y += s.shift
        return s.b(y.relu_())  # type: ignore[no-any-return]

    return Stage(forward, a=p.linear(), b=p.linear(), shift=weight(WIDTH))


def _spectrum(p: Parts) -> Stage:
    def forward(s: Any, x: Tensor) -> Tensor:
        return torch.fft.irfft(p.product(torch.fft.rfft(s.a(x)) * s.filter, s.mix), n=WIDTH)  # type: ignore[no-any-return]

    filters, mix = (nn.Parameter(torch.randn(*shape, dtype=_complex())) for shape in ((4,), (4, 4)))
    return Stage(forward, a=p.linear(), filter=filters, mix=mix)


def _complex() -> torch.dtype:
    return torch.get_default_dtype().to_complex()


def _make_scaled(p: Parts) -> Stage:
    def forward(s: Any, x: Tensor) -> Tensor:
        normed = s.direction / s.direction.norm(dim=1, keepdim=True) * s.length
        return torch.tanh(p.product(x, normed)) * (1 + s.gain)  # type: ignore[no-any-return]

    return Stage(forward, direction=weight(), length=weight(WIDTH, 1), gain=weight(WIDTH))


Make = Callable[[Parts], Stage]
X = "x"
"""An input that needs a gradient; `TOKENS` are integers, `DATA` is a tensor that needs none."""
TOKENS, DATA = "tokens", "data"

STAGES: dict[str, tuple[Make, Sequence[str | None]]] = {
    "affine": (lambda p: Stage(lambda s, x: s.a(x), a=p.linear()), [X]),
    "mlp": (
        lambda p: Stage(lambda s, x: s.b(torch.relu(s.a(x))), a=p.linear(outputs=9), b=p.linear(9, bias=False)),
        [X],
    ),
    "residual": (lambda p: Stage(lambda s, x: x + s.b(torch.tanh(s.a(x))), a=p.linear(), b=p.linear()), [X]),
    "transformer block": (_block, [X]),
    "norms": (
        lambda p: Stage(
            lambda s, x: s.n(p.rms_norm(s.a(x), s.w)), n=nn.LayerNorm(WIDTH), w=weight(WIDTH), a=p.linear()
        ),
        [X],
    ),
    "convolutions": (lambda p: Stage(lambda s, x: s.b(s.a(x).relu()), a=nn.Conv1d(4, 5, 1), b=nn.Conv1d(5, 4, 1)), [X]),
    "batch norm, in place": (
        lambda p: Stage(lambda s, x: s.n(s.a(x).relu_().flatten(0, 1)), a=p.linear(), n=nn.BatchNorm1d(WIDTH)),
        [X],
    ),
    "dropout": (lambda p: Stage(lambda s, x: s.b(F.dropout(s.a(x))), a=p.linear(), b=p.linear()), [X]),
    "table of positions": (lambda p: Stage(lambda s, x: s.a(x + s.t[:4]), t=weight(8, WIDTH), a=p.linear()), [X]),
    "shared in series": (lambda p: Stage(lambda s, x: p.product(p.product(x, s.w), s.w), w=weight()), [X]),
    "tied around another": (
        lambda p: Stage(lambda s, x: s.a(s.b(s.a(x).tanh()).tanh()), a=p.linear(), b=p.linear()),
        [X],
    ),
    "alternating": (
        lambda p: Stage(lambda s, x: s.b(s.a(s.b(s.a(x).tanh()).tanh()).tanh()), a=p.linear(), b=p.linear()),
        [X],
    ),
    "node with several outputs": (
        lambda p: Stage(lambda s, x: (lambda a, b, c: a * b.tanh() + c)(*s.a(x).chunk(3, -1)), a=p.linear(outputs=18)),
        [X],
    ),
    "several outputs at the join": (
        lambda p: Stage(
            lambda s, x: (lambda a, b: p.product(a, s.w) * b)(*(x * s.t).unbind(0)), t=weight(2, 4, 6), w=weight()
        ),
        [X],
    ),
    "product of parameters": (
        lambda p: Stage(lambda s, x: p.product(p.product(x, p.product(s.u, s.v)), s.u), u=weight(), v=weight()),
        [X],
    ),
    "scaled weight": (_make_scaled, [X]),
    "weight on the left": (
        lambda p: Stage(lambda s, x: s.w @ x + s.v.T @ s.w @ x, w=weight(4, 4), v=weight(4, 4)),
        [X],
    ),
    "weight made from the input": (
        lambda p: Stage(lambda s, x: p.product(x, s.a(x)[0, :1].T @ s.b(x)[0, :1]), a=p.linear(), b=p.linear()),
        [X],
    ),
    "output without the input": (
        lambda p: Stage(lambda s, x: s.b(s.a(torch.ones_like(x)).tanh()), a=p.linear(), b=p.linear()),
        [X],
    ),
    "outputs with and without the input": (
        lambda p: Stage(lambda s, x: (s.b(x), s.a(torch.ones_like(x))), a=p.linear(), b=p.linear()),
        [X],
    ),
    "shared with an output without the input": (
        lambda p: Stage(lambda s, x: (s.a(x), s.b(s.a(torch.ones_like(x)))), a=p.linear(), b=p.linear()),
        [X],
    ),
    "first stage": (
        lambda p: Stage(lambda s, t: s.a(p.embedding(t, s.w)).tanh(), w=weight(11, WIDTH), a=p.linear()),
        [TOKENS],
    ),
    "input without gradient": (lambda p: Stage(lambda s, x: s.b(s.a(x).tanh()), a=p.linear(), b=p.linear()), [DATA]),
    "only some inputs with gradient": (
        lambda p: Stage(
            lambda s, x, d, t: s.a(x) * s.b(d) + p.embedding(t, s.w), a=p.linear(), b=p.linear(), w=weight(11, 6)
        ),
        [X, DATA, TOKENS],
    ),
    "two outputs": (lambda p: Stage(lambda s, x: (s.b(y := s.a(x).tanh()), y), a=p.linear(), b=p.linear()), [X]),
    "view as output": (lambda p: Stage(lambda s, x: s.a(x).transpose(0, 1)[..., ::2], a=p.linear()), [X]),
    "input and parameter as outputs": (
        lambda p: Stage(lambda s, x: (x, s.w, p.product(x, s.w)), w=weight()),
        [X],
    ),
    "integers, booleans, None": (
        lambda p: Stage(lambda s, x, t, n: (y := s.a(x), y > 0, None, t + 1, 7, y.detach()), a=p.linear()),
        [X, TOKENS, None],
    ),
    "frozen": (_make_frozen, [X]),
    "nothing to train": (lambda p: Stage(lambda s, x: s.a(x).tanh(), a=p.linear().requires_grad_(False)), [X]),
    "somebody else's function": (lambda p: Stage(lambda s, x: s.a(cube(x, s.w)), w=weight(), a=p.linear()), [X]),
    "two parameters at one node": (
        lambda p: Stage(lambda s, x: torch.addcmul(x.tanh(), s.u, s.v), u=weight(4, 6), v=weight(4, 6)),
        [X],
    ),
    "ours and torch's share a weight": (
        lambda p: Stage(lambda s, x: linear_eager(x, s.w) @ (s.w @ s.v) @ s.w, w=weight(), v=weight()),
        [X],
    ),
    "recomputed": (lambda p: _make_recomputed(p, use_reentrant=False), [X]),
    "recomputed within what is recomputed": (_make_recomputed_twice, [X]),
    "rerun": (_rerun, [X]),
    "rerun, and recomputed within": (_rerun_twice, [X]),
    "block that is rerun": (_rerun_block, [X]),
    "saved elsewhere": (_make_offloaded, [X]),
    "activations changed in place": (_make_changed_in_place, [X]),
    "complex numbers": (_spectrum, [X]),
    "halves of a weight": (
        lambda p: Stage(lambda s, x: p.product(p.product(x, s.w[:6]).tanh(), s.w[6:]), w=weight(12, 6)),
        [X],
    ),
    "one weight for each expert": (
        lambda p: Stage(lambda s, x: sum(p.product(x, matrix).tanh() for matrix in s.w.unbind()), w=weight(3, 6, 6)),
        [X],
    ),
    "weight, its view and its transpose": (
        lambda p: Stage(lambda s, x: p.product(p.product(x, s.w).tanh(), s.w.view(6, 6)) + x @ s.w.t(), w=weight()),
        [X],
    ),
    "one transpose in two places": (
        lambda p: Stage(lambda s, x: (lambda t: p.product(x @ t, s.v) @ t)(s.w.t()), w=weight(), v=weight()),
        [X],
    ),
    "weight that is stored by columns": (
        lambda p: Stage(lambda s, x: p.product(x, s.w), w=nn.Parameter(weight().detach().t())),
        [X],
    ),
}
"""Stage factories and input kinds, by name."""


def re_entrant(ops: Ops) -> Stage:
    """Return a stage with recomputation that cannot be split."""
    return _make_recomputed(Parts(ops), use_reentrant=True)


def inputs_of(kinds: Sequence[str | None]) -> list[Any]:
    """Return fresh inputs of the default dtype."""
    makers = {X: lambda: torch.randn(2, 4, WIDTH, requires_grad=True), DATA: lambda: torch.randn(2, 4, WIDTH)}
    makers[TOKENS] = lambda: torch.randint(11, (2, 4))
    return [None if kind is None else makers[kind]() for kind in kinds]
