"""The compared operations at the sizes of real models, with their least bytes or FLOPs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import peers
from drawloom.components.ports.data import count_visible_keys
from drawloom.kernels.adamw.eager import ParamState, compute_scales_shape, compute_step_scalars
from drawloom.kernels.adamw.triton import AdamwTriton
from drawloom.kernels.attention.eager import EAGER, AttentionImplementation
from drawloom.kernels.cross_entropy.options import LogitCut
from drawloom.kernels.cross_entropy.triton import cut_cross_entropy_triton, linear_cross_entropy_triton
from drawloom.kernels.gates.eager import geglu_eager, oss_swiglu_halves_eager, swiglu_eager
from drawloom.kernels.gates.triton import geglu_triton, oss_swiglu_halves_triton, swiglu_triton
from drawloom.kernels.gradients.eager import scale_and_sum_squares, scale_and_sum_squares_eager
from drawloom.kernels.grouped_gemm.eager import grouped_gemm_torch
from drawloom.kernels.grouped_gemm.triton import grouped_gemm_triton
from drawloom.kernels.moe.eager import moe_permute_eager, moe_routes_eager, moe_unpermute_eager
from drawloom.kernels.moe.triton import moe_permute_triton, moe_routes_triton, moe_unpermute_triton
from drawloom.kernels.rms_norm.eager import add_rms_norm_eager, rms_norm_eager
from drawloom.kernels.rms_norm.triton import add_rms_norm_triton, rms_norm_triton
from drawloom.kernels.rope.eager import qk_norm_rope_eager, rope_eager
from drawloom.kernels.rope.frequencies import compute_rope_cos_and_sin
from drawloom.kernels.rope.triton import qk_norm_rope_triton, rope_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RANDOM = torch.Generator(DEVICE)
"""A separate generator: torch's default one is unusable after a failed capture."""


@dataclass(frozen=True)
class Row:
    """
    An operation at one size: `make` returns the inputs with gradients and the other inputs, in argument order.

    `floor` has the least bytes, or matrix FLOPs, of forward and backward. `reference` is computed with float32 inputs.
    For operations without gradients the second floor is 0.
    """

    operation: str
    size: str
    make: Callable[[], tuple[tuple[Tensor, ...], tuple[Any, ...]]]
    ours: dict[str, Callable[..., Any]]
    torch: dict[str, Callable[..., Any]] = field(default_factory=dict)
    reference: Callable[..., Any] | None = None
    floor: tuple[float, float] = (0.0, 0.0)
    in_operations: bool = False

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Return all implementations, ours first."""
        return {**self.ours, **self.torch, **peers.available_peers(self.operation)}


def numbers(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=DEVICE, generator=RANDOM) * scale).bfloat16().requires_grad_()


def rows(tiny: bool) -> Iterator[Row]:
    """Yield all rows, at small sizes for an interpreter if `tiny`."""
    yield from _norms(tiny)
    yield from _gates(tiny)
    yield from _rotations(tiny)
    yield from _losses(tiny)
    yield from _steps(tiny)
    yield from _experts(tiny)
    yield from _attentions(tiny)


def _norms(tiny: bool) -> Iterator[Row]:
    for count, width in [(6, 40)] if tiny else [(8192, 4096), (16384, 2048), (2**20, 128)]:
        elements = count * width
        yield Row(
            "rms_norm",
            f"{count} x {width}",
            lambda c=count, w=width: ((numbers(c, w), numbers(w)), (1e-6,)),  # type: ignore[misc]
            {"drawloom": rms_norm_triton},
            {"eager": peers.rms_norm, "compile": peers.compile_function(peers.rms_norm)},
            rms_norm_eager,
            (4.0 * elements, 6.0 * elements),
        )
    count, width = (6, 40) if tiny else (16384, 2048)
    yield Row(
        "add_rms_norm",
        f"{count} x {width}",
        lambda: ((numbers(count, width), numbers(count, width), numbers(width)), (1e-6,)),
        {"drawloom": add_rms_norm_triton},
        {"eager": peers.add_rms_norm, "compile": peers.compile_function(peers.add_rms_norm)},
        add_rms_norm_eager,
        (8.0 * count * width, 8.0 * count * width),
    )


def _gates(tiny: bool) -> Iterator[Row]:
    for count, width in [(6, 40)] if tiny else [(16384, 6144), (16384, 1536)]:
        yield Row(
            "swiglu",
            f"{count} x {width}",
            lambda c=count, w=width: ((numbers(c, w), numbers(c, w)), ()),  # type: ignore[misc]
            {"drawloom": swiglu_triton},
            {"eager": peers.swiglu, "compile": peers.compile_function(peers.swiglu)},
            swiglu_eager,
            (6.0 * count * width, 10.0 * count * width),
        )
    count, width = (6, 40) if tiny else (16384, 2880)
    yield Row(
        "geglu",
        f"{count} x {width}",
        lambda: ((numbers(count, width), numbers(count, width)), ()),
        {"drawloom": geglu_triton},
        {"eager": peers.geglu, "compile": peers.compile_function(peers.geglu)},
        geglu_eager,
        (6.0 * count * width, 10.0 * count * width),
    )
    yield Row(
        "oss_swiglu_halves",
        f"{count} x {width}",
        lambda: ((numbers(count, 2 * width), numbers(count)), (1.702, 7.0)),
        {"drawloom": oss_swiglu_halves_triton},
        {"eager": peers.oss_swiglu, "compile": peers.compile_function(peers.oss_swiglu)},
        oss_swiglu_halves_eager,
        (6.0 * count * width, 10.0 * count * width),
    )


def _rotations(tiny: bool) -> Iterator[Row]:
    batch, length, heads, kv_heads, channels = (1, 5, 4, 2, 8) if tiny else (8, 4096, 32, 8, 128)
    positions = torch.arange(length, device=DEVICE).expand(batch, length)
    angles = compute_rope_cos_and_sin(positions, channels, 1e6)
    elements = batch * length * (heads + kv_heads) * channels
    yield Row(
        "rope",
        f"{batch} x {length}, {heads + kv_heads} heads of {channels}",
        lambda: ((numbers(batch, length, heads + kv_heads, channels),), angles),
        {"drawloom": rope_triton},
        {"eager": peers.rope, "compile": peers.compile_function(peers.rope)},
        rope_eager,
        (4.0 * elements, 4.0 * elements),
    )
    yield Row(
        "qk_norm_rope",
        f"{batch} x {length}, {heads}/{kv_heads} heads of {channels}",
        lambda: (
            (*(numbers(batch, length, h, channels) for h in (heads, kv_heads)), numbers(channels), numbers(channels)),
            (1e-6, *angles),
        ),
        {"drawloom": qk_norm_rope_triton},
        {"eager": peers.qk_norm_rope, "compile": peers.compile_function(peers.qk_norm_rope)},
        qk_norm_rope_eager,
        (4.0 * elements, 6.0 * elements),
    )


def _losses(tiny: bool) -> Iterator[Row]:
    tokens, width, words = (20, 32, 50) if tiny else (8192, 2048, 151936)
    product = 2.0 * tokens * width * words
    uniform = torch.full((words,), 1 / words, device=DEVICE)
    # As in real text, a word's probability falls with its rank (Zipf). Words are numbered in random order.
    zipf = 1.0 / (1 + torch.randperm(words, device=DEVICE, generator=RANDOM))

    def sum_losses(function: Callable[..., tuple[Tensor, Tensor]], *arguments: Any) -> Tensor:
        losses, _ = function(*arguments)
        return losses.sum()

    def make(chances: Tensor) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        hidden, weight = numbers(tokens, width), numbers(words, width, scale=width**-0.5)
        with torch.no_grad():  # one channel encodes word frequencies, as in a model that has begun to learn
            hidden[:, 0], weight[:, 0] = 8, (chances * words).log() / 8
        return (hidden, weight), (torch.multinomial(chances, tokens, replacement=True, generator=RANDOM),)

    for name, chances in (("", uniform), (", words as frequent as in texts", zipf)):
        yield Row(
            "linear_cross_entropy",
            f"{tokens} tokens, {width} x {words}{name}",
            partial(make, chances),
            {
                "drawloom": partial(sum_losses, linear_cross_entropy_triton),
                "drawloom cut": partial(sum_losses, cut_cross_entropy_triton.__call__),
                "drawloom filtered": lambda h, w, t: sum_losses(
                    cut_cross_entropy_triton.__call__, h, w, t, LogitCut(filter_eps=2**-12)
                ),
            },
            {"eager": peers.linear_cross_entropy, "compile": peers.compile_function(peers.linear_cross_entropy)},
            peers.linear_cross_entropy,
            (product, 2 * product),
            in_operations=True,
        )


def _steps(tiny: bool) -> Iterator[Row]:
    sizes = [40, 100] if tiny else [1_666_667 // 2048 * 2048] * 300
    elements = sum(sizes)

    def make() -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        kinds = [[torch.rand(size, device=DEVICE, generator=RANDOM).bfloat16() for size in sizes] for _ in "wgms"]
        return (), tuple(kinds)

    def ours(counter: int | None) -> Callable[..., Any]:
        steppers: dict[int, AdamwTriton] = {}

        def step(weights: list[Tensor], gradients: list[Tensor], means: list[Tensor], squares: list[Tensor]) -> None:
            if id(weights) not in steppers:
                kept = zip(weights, means, squares, strict=True)
                steppers[id(weights)] = AdamwTriton([ParamState(w, m, s, 0.1, 7) for w, m, s in kept])
            steppers[id(weights)].step(gradients, compute_step_scalars(1e-3, (0.9, 0.95), 1e-8, 7), counter)

        return step

    for name, counter in (("stochastic_adamw", 7), ("adamw", None)):
        yield Row(
            name,
            f"{elements / 1e6:.0f}M in {len(sizes)}, all bfloat16",
            make,
            {"drawloom": ours(counter)},
            {"torch's own, rounding to nearest": _torch_step},
            None,
            (14.0 * elements, 0.0),
        )
    yield _adamw_8bit_row(tiny)
    for name, counted in (("scale", ()), ("scale_and_norm", (True,) * len(sizes))):
        yield Row(
            name,
            f"{elements / 1e6:.0f}M in {len(sizes)}, bfloat16",
            lambda: ((), (make()[1][0], torch.tensor(0.999, dtype=torch.float64, device=DEVICE))),
            {"drawloom": partial(scale_and_sum_squares, counted=counted)},
            {"eager": partial(scale_and_sum_squares_eager, counted=counted)},
            None,
            (4.0 * elements, 0.0),
        )


def _adamw_8bit_row(tiny: bool) -> Row:
    shapes = [(4, 256)] if tiny else [(4096, 4096)] * 32
    elements = sum(rows * width for rows, width in shapes)

    def make() -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        kinds = [[torch.rand(shape, device=DEVICE, generator=RANDOM).bfloat16() for shape in shapes] for _ in "wg"]
        codes = [[torch.randint(256, shape, device=DEVICE, dtype=torch.uint8) for shape in shapes] for _ in "ms"]
        return (), (*kinds, *codes)

    steppers: dict[int, AdamwTriton] = {}

    def step(weights: list[Tensor], gradients: list[Tensor], means: list[Tensor], squares: list[Tensor]) -> None:
        if id(weights) not in steppers:
            scales = [[torch.rand(compute_scales_shape(shape), device=DEVICE) for shape in shapes] for _ in "ms"]
            steppers[id(weights)] = AdamwTriton(
                [
                    ParamState(weight, mean, square, 0.1, 7, exp_avg_scale=mean_scale, exp_avg_sq_scale=square_scale)
                    for weight, mean, square, mean_scale, square_scale in zip(
                        weights, means, squares, *scales, strict=True
                    )
                ]
            )
        steppers[id(weights)].step(gradients, compute_step_scalars(1e-3, (0.9, 0.95), 1e-8, 7), 7)

    size = f"{elements / 1e6:.0f}M in {len(shapes)}, means of 8 bits"
    return Row("adamw_8bit", size, make, {"drawloom": step}, {}, None, (10.0 * elements, 0.0))


def _torch_step(weights: list[Tensor], gradients: list[Tensor], means: list[Tensor], squares: list[Tensor]) -> None:
    steps = [torch.ones((), device=weights[0].device)] * len(weights)
    rates = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
    torch._fused_adamw_(weights, gradients, means, squares, [], steps, amsgrad=False, maximize=False, **rates)  # type: ignore[call-overload]


def _experts(tiny: bool) -> Iterator[Row]:
    tokens, choices, experts, width, inner = (10, 2, 4, 16, 24) if tiny else (32768, 8, 128, 2048, 1536)
    expert_indices = torch.rand(tokens, experts, device=DEVICE, generator=RANDOM).topk(choices, 1).indices
    routes = moe_routes_eager(expert_indices, experts)
    rows_of_all, byte = tokens * choices, 2.0

    def permute_and_unpermute(x: Tensor, probabilities: Tensor, chosen: Tensor, count: int) -> Tensor:
        dispatch_routes = moe_routes_triton(chosen, count)
        permuted, _ = moe_permute_triton(x, probabilities, dispatch_routes)
        return moe_unpermute_triton(permuted, dispatch_routes, probabilities)

    def permute_eagerly(x: Tensor, probabilities: Tensor, chosen: Tensor, count: int) -> Tensor:
        dispatch_routes = moe_routes_eager(chosen, count)
        permuted, _ = moe_permute_eager(x, probabilities, dispatch_routes)
        return moe_unpermute_eager(permuted, dispatch_routes, probabilities)

    yield Row(
        "moe_routes",
        f"{tokens} tokens, {choices} of {experts}",
        lambda: ((), (expert_indices, experts)),
        {"drawloom": moe_routes_triton},
        {"eager": moe_routes_eager},
        None,
        (16.0 * rows_of_all, 0.0),
    )
    yield Row(
        "experts",
        f"{tokens} tokens, {choices} of {experts}, {width}",
        lambda: (
            (numbers(tokens, width), torch.rand(tokens, choices, device=DEVICE, generator=RANDOM).requires_grad_()),
            (expert_indices, experts),
        ),
        {"drawloom": permute_and_unpermute},
        {"eager": permute_eagerly},
        permute_eagerly,
        (2 * byte * (tokens + rows_of_all) * width, byte * (2 * tokens + 4 * rows_of_all) * width),
    )
    product = 2.0 * rows_of_all * width * inner
    yield Row(
        "grouped_gemm",
        f"{rows_of_all} x {width} x {inner}, {experts} experts",
        lambda: ((numbers(rows_of_all, width), numbers(experts, width, inner, scale=width**-0.5)), (routes.offsets,)),
        {"drawloom": grouped_gemm_triton.__call__},
        {"torch": grouped_gemm_torch.__call__},
        None,
        (product, 2 * product),
        in_operations=True,
    )


def _attentions(tiny: bool) -> Iterator[Row]:
    length = 20 if tiny else 4096
    yield _attention_in(torch.zeros(length, dtype=torch.int64), "one document a row", tiny)
    yield _attention_in(torch.arange(length) * 5 // length // 2, "documents of 0.4, 0.4 and 0.2 of a row", tiny)


def _attention_in(row: Tensor, description: str, tiny: bool) -> Row:
    """Return the attention row for a batch of equal rows with these document ids (length,)."""
    batch, length, heads, channels = (1, len(row), 2, 16) if tiny else (8, len(row), 16, 128)
    documents = row.to(DEVICE).repeat(batch, 1)
    product = 4.0 * batch * heads * channels * int(count_visible_keys(row[None]).sum())
    fast: dict[str, Callable[..., Any]] = {}
    if DEVICE.type == "cuda":
        from drawloom.kernels.attention.cudnn import CUDNN
        from drawloom.kernels.attention.flash import VARLEN
        from drawloom.kernels.attention.flex import FLEX

        kinds = {"flex": FLEX, "varlen": VARLEN} | ({} if row.any() else {"cudnn": CUDNN})
        fast = {f"drawloom {name}": _with_mask(kind, documents) for name, kind in kinds.items()}
    eager = _with_mask(EAGER, documents)
    return Row(
        "attention",
        f"{batch} x {length}, {heads} heads of {channels}, {description}",
        lambda: (tuple(numbers(batch, length, heads, channels) for _ in "qkv"), ()),
        fast,
        {"eager": eager},
        eager,
        (product, 2.5 * product),
        in_operations=True,
    )


def _with_mask(attention: AttentionImplementation, documents: Tensor) -> Callable[..., Tensor]:
    """Return attention with the mask precomputed, as in a layer."""
    mask = attention.mask(documents) if attention.one_document_mask is None else attention.one_document_mask
    return lambda q, k, v: attention.attend(q, k, v, mask)
