"""Every Triton kernel, in the sizes and dtypes of models, for compilers without a GPU."""

from collections.abc import Callable, Iterator
from itertools import product
from unittest import mock

import torch
from torch import Tensor

from drawloom.kernels.adamw.eager import ParamState, compute_step_scalars, encode_8bit
from drawloom.kernels.adamw.triton import AdamwTriton
from drawloom.kernels.batch_invariant import triton as block_attention
from drawloom.kernels.cross_entropy import triton as cross_entropy
from drawloom.kernels.float8 import triton as float8
from drawloom.kernels.float8.eager import E4M3
from drawloom.kernels.gated_delta import triton as gated_delta
from drawloom.kernels.gates import triton as gate_kernels
from drawloom.kernels.gradients.triton import scale_and_sum_squares_triton, sum_parts_triton
from drawloom.kernels.grouped_gemm import triton as grouped_gemm
from drawloom.kernels.hyper_connections import triton as hyper_connections
from drawloom.kernels.moe import triton as moe
from drawloom.kernels.results import Routes
from drawloom.kernels.rms_norm import triton as rms_norm
from drawloom.kernels.rope import triton as rope
from drawloom.kernels.sampling.triton import draw_ids_triton
from drawloom.kernels.sparse_attention import triton as sparse_attention
from drawloom.kernels.state_space import triton as state_space
from drawloom.kernels.triton import tma
from drawloom.kernels.weight_formats import triton as weight_formats
from drawloom.kernels.weight_formats.eager import FORMATS, STORAGE

Launch = Callable[[], object]
BF16, FLOAT = torch.bfloat16, torch.float32


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Return uninitialized memory, which costs nothing until it is touched."""
    return torch.empty(shape, dtype=dtype)


def launches() -> Iterator[tuple[str, Launch]]:
    """Yield a name and a call for each operation and direction; the call launches the kernels."""
    for part in (
        norms,
        gates,
        rotations,
        attention,
        choices,
        draws,
        steps,
        losses,
        experts,
        exchanges,
        casts,
        recurrences,
        connections,
        great_numbers,
    ):
        yield from part()


def norms() -> Iterator[tuple[str, Launch]]:
    for width, dtype in [(128, BF16), (2048, BF16), (4096, BF16), (5120, BF16), (4096, FLOAT)]:
        x, weight, inverse = empty(64, width, dtype=dtype), empty(width, dtype=dtype), empty(64, dtype=FLOAT)
        yield f"rms_norm {width} {dtype}", lambda x=x, w=weight: rms_norm._forward(x, None, w, 1e-6, False)
        yield f"rms_norm_float8 {width} {dtype}", lambda x=x, w=weight: float8._norm_and_quantize(x, x, w, 1e-6, False)
        yield f"add_rms_norm {width} {dtype}", lambda x=x, w=weight: rms_norm._forward(x, x, w, 1e-6, True)
        for name, summed in (("rms_norm", None), ("add_rms_norm", x)):
            yield (
                f"{name} backward {width} {dtype}",
                lambda x=x, s=summed, w=weight, i=inverse: rms_norm._backward(x, s, x, w, i, False, True),
            )


def gates() -> Iterator[tuple[str, Launch]]:
    for dtype in (BF16, FLOAT):
        gate, gate_and_up, scale = empty(64, 1536, dtype=dtype), empty(64, 3072, dtype=dtype), empty(64, dtype=FLOAT)
        yield f"swiglu {dtype}", lambda g=gate: gate_kernels._apply_gate(g, g, None, 0)
        yield f"swiglu backward {dtype}", lambda g=gate: gate_kernels._compute_gradients(g, g, g, None, 0)
        yield f"swiglu scaled {dtype}", lambda b=gate_and_up, s=scale: gate_kernels._apply_gate_to_halves(b, s, 0)
        yield (
            f"swiglu of halves backward {dtype}",
            lambda g=gate, b=gate_and_up, s=scale: gate_kernels._compute_gradients_of_halves(g, b, s, 0),
        )


def rotations() -> Iterator[tuple[str, Launch]]:
    q, k, cos, weight = empty(2, 64, 32, 128), empty(2, 64, 8, 128), empty(2, 64, 64, dtype=FLOAT), empty(128)
    inverses = empty(2, 64, 32, dtype=FLOAT), empty(2, 64, 8, dtype=FLOAT)
    for interleaved, back, part in product((False, True), (False, True), (64, 32)):
        angles = cos[..., :part]
        yield (
            f"rope interleaved={interleaved} back={back} of {2 * part}",
            lambda a=angles, i=interleaved, b=back: rope._rotate(q, a, a, i, b),
        )
    yield "qk_norm_rope", lambda: rope._qk_norm_rope(q, k, weight, weight, 1e-6, cos, cos)
    yield (
        "qk_norm_rope backward",
        lambda: rope._qk_norm_rope_backward(q, k, q, k, weight, weight, 1e-6, cos, cos, *inverses),
    )


def attention() -> Iterator[tuple[str, Launch]]:
    for width, v_width, dtype in [(128, 128, BF16), (192, 128, BF16), (256, 256, FLOAT)]:
        q, k, v = (empty(2, 64, heads, w, dtype=dtype) for heads, w in ((8, width), (2, width), (2, v_width)))
        documents, count = torch.zeros(2, 64, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        for options in ((documents, q[0, 0, :, 0], None, 32), (None, None, count, 0)):
            yield (
                f"block_attention {width}/{v_width} {dtype} window {options[-1]}",
                lambda q=q, k=k, v=v, o=options: block_attention._attend(q, k, v, *o, 0.1, 0.0),  # type: ignore[call-arg]
            )


def choices() -> Iterator[tuple[str, Launch]]:
    bounds = torch.zeros(1, 2, dtype=torch.int32)
    for heads, dtype, chosen in ((128, BF16, 2048), (64, BF16, 2048), (128, FLOAT, 512)):
        queries, keys, factors = empty(1, 2, 64, 128, dtype=dtype), empty(1, 2, 128, dtype=dtype), empty(1, 2, 64)
        q, latents, grad = (empty(1, 2, *shape, dtype=dtype) for shape in ((heads, 576), (576,), (heads, 512)))
        choice, name = torch.full((1, 2, chosen), -1, dtype=torch.int32), f"{heads} heads {dtype}"
        index, inputs = (queries, keys, factors), (q, latents, choice)
        yield f"choose_keys {name}", lambda i=index: sparse_attention._choose_keys(*i, bounds, bounds, 16)  # type: ignore[call-arg]
        yield (
            f"choose_keys backward {name}",
            lambda i=index, c=choice: sparse_attention._choose_keys_backward(c.float(), *i, c),  # type: ignore[call-arg]
        )
        yield f"sparse_attention {name}", lambda i=inputs: sparse_attention._attend(*i, 512, 0.1)  # type: ignore[call-arg]
        yield (
            f"sparse_attention backward {name}",
            lambda i=inputs, g=grad: sparse_attention._attend_backward(g, g, g[..., 0].float(), *i, 0.1),  # type: ignore[call-arg]
        )


def draws() -> Iterator[tuple[str, Launch]]:
    for dtype, temperature in product((BF16, FLOAT), (None, empty(dtype=FLOAT))):
        logits, uniforms = empty(8, 151_936, dtype=dtype), empty(8, dtype=torch.float64)
        yield (
            f"draw {dtype} {temperature is not None}",
            lambda x=logits, u=uniforms, t=temperature: draw_ids_triton(x, u, t),
        )


def steps() -> Iterator[tuple[str, Launch]]:
    for dtype in (BF16, torch.float16, FLOAT):

        def scaled(dtype_of_values: torch.dtype = dtype) -> None:
            for counted in (False, True):
                scale_and_sum_squares_triton(
                    [empty(4096, dtype=dtype_of_values)], empty(dtype=torch.float64), (counted,)
                )

        yield f"scale {dtype}", scaled
    for dtype in (BF16, torch.float16):

        def summed(dtype_of_values: torch.dtype = dtype) -> None:
            sum_parts_triton(
                empty(4096, dtype=dtype_of_values),
                empty(8, 4096, dtype=dtype_of_values),
                empty(4096, dtype=dtype_of_values),
            )

        yield f"sum_parts {dtype}", summed
    for of_weight, of_gradient, of_means in product((BF16, FLOAT), repeat=3):

        def step(w: torch.dtype = of_weight, g: torch.dtype = of_gradient, m: torch.dtype = of_means) -> None:
            trained = ParamState(empty(4096, dtype=w), empty(4096, dtype=m), empty(4096, dtype=m), 0.1, 1 << 60)
            stepper = AdamwTriton([trained])
            for counter in (1, None):
                stepper.step([empty(4096, dtype=g)], compute_step_scalars(1e-3, (0.9, 0.95), 1e-8, 1), counter)

        yield f"adamw {of_weight} {of_gradient} {of_means}", step
    for of_weight, of_gradient, width in product((BF16, FLOAT), (BF16, FLOAT), (1000, 1024)):

        def step_8bit(w: torch.dtype = of_weight, g: torch.dtype = of_gradient, width: int = width) -> None:
            mean, square = (encode_8bit(torch.zeros(4, width), signed=signed) for signed in (True, False))
            weight, means, scales = empty(4, width, dtype=w), (mean.codes, square.codes), (mean.scales, square.scales)
            trained = ParamState(weight, *means, 0.1, 1 << 60, exp_avg_scale=scales[0], exp_avg_sq_scale=scales[1])
            stepper = AdamwTriton([trained])
            stepper.step([empty(4, width, dtype=g)], compute_step_scalars(1e-3, (0.9, 0.95), 1e-8, 1), 1)

        yield f"adamw 8 bits {of_weight} {of_gradient} {width}", step_8bit
    for first in (1, 2):

        def step_of_columns(first: int = first) -> None:
            kept = [empty(4096, dtype=BF16) for _ in "wms"]
            stepper = AdamwTriton(
                [ParamState(kept[0], kept[1], kept[2], 0.1, 1 << 60, first, row_width=64, row_stride=128)]
            )
            stepper.step([empty(4096, dtype=BF16)], compute_step_scalars(1e-3, (0.9, 0.95), 1e-8, 1), 1)

        yield f"adamw of columns from {first} on", step_of_columns


def _with_tf32(tf32: bool, launch: Launch) -> Launch:
    """Let torch multiply float32 by TF32, or not, during a launch."""

    def run() -> None:
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        launch()
        torch.set_float32_matmul_precision("highest")

    return run


def _with_tma(launch: Launch) -> Launch:
    """Launch as on a GPU with TMA."""

    def run() -> None:
        with mock.patch.object(tma, "is_supported", return_value=True):
            launch()

    return run


def connections() -> Iterator[tuple[str, Launch]]:
    kinds = [(BF16, 4, *ends) for ends in ((False, True), (True, True), (True, False))]
    for (dtype, count, writes, reads), constrained in product([*kinds, (FLOAT, 2, True, True)], (False, True)):
        streams, output = empty(64, count, 2048, dtype=dtype), empty(64, 2048, dtype=dtype)
        weights = empty(64, count + 2, count, dtype=FLOAT)
        shape = (count * (count + 2), count * 2048) if constrained else (count + 2, 2048)
        vector, mix, scale = (empty(*sizes, dtype=dtype) for sizes in ((count,), (count, count), (2 + constrained,)))
        projection = empty(*shape, dtype=dtype) if reads else None
        written = streams, *((output, weights) if writes else (None,) * 2), projection
        parameters = (vector, vector, mix, scale) if reads else (None,) * 4
        name, kind = f"connect_streams {count} {dtype} {writes} {reads} {constrained}", constrained and reads
        yield (
            name,
            lambda w=written, p=parameters, kind=kind: hyper_connections._connect(*w, *p, 1e-6, 1, kind),  # type: ignore[call-arg]
        )
        saved = streams, output, weights, *written, *parameters[2:], weights, weights, weights
        yield (
            f"{name} backward",
            lambda saved=saved, kind=kind: hyper_connections._connect_backward(*saved, kind),  # type: ignore[call-arg]
        )


def great_numbers() -> Iterator[tuple[str, Launch]]:
    """Yield launches with 64-bit scalars, signed or not, in place of small 32-bit ones."""
    storage, norm, targets = empty(2**31 + 2**12), empty(128), torch.zeros(2, dtype=torch.int64)
    rows, numbers, ends = storage.as_strided((2, 128), (2**31, 1)), empty(2, dtype=FLOAT), targets.to(torch.int32)
    matrices = storage.as_strided((2, 128, 2), (1, 8, 2**31))
    for name, shape in (("rows", (2, 1, 1)), ("positions", (1, 2, 1)), ("heads", (1, 1, 2))):
        vectors = storage.as_strided((*shape, 128), (2**31, 2**31, 2**31, 1))
        cos, inverses = empty(*shape[:2], 64, dtype=FLOAT), empty(*shape, dtype=FLOAT)
        yield f"rope of far {name}", lambda x=vectors, c=cos: rope._rotate(x, c, c, False, False)
        yield (
            f"qk_norm_rope of far {name}",
            lambda x=vectors, c=cos: rope._qk_norm_rope(x, x, norm, norm, 1e-6, c, c),
        )
        yield (
            f"qk_norm_rope backward of far {name}",
            lambda x=vectors, c=cos, i=inverses: rope._qk_norm_rope_backward(x, x, x, x, norm, norm, 1e-6, c, c, i, i),
        )
    yield "rms_norm of far rows", lambda: rms_norm._forward(rows, rows, norm, 1e-6, False)
    yield "rms_norm backward of far rows", lambda: rms_norm._backward(rows, rows, rows, norm, numbers, False, True)
    yield "swiglu of far rows", lambda: gate_kernels._apply_gate(rows, rows, numbers, 0)
    yield "swiglu backward of far rows", lambda: gate_kernels._compute_gradients(rows, rows, rows, numbers, 0)
    yield "swiglu of many elements", lambda: gate_kernels._apply_gate(storage, storage, None, 0)
    yield (
        "cut_cross_entropy of far rows",
        lambda: cross_entropy._forward(rows, rows, targets, 128, 256, 2**28),
    )
    yield (
        "cut_cross_entropy backward of far rows",
        lambda: cross_entropy._backward(
            rows, rows, targets, numbers, numbers, numbers, 1e-4, 128, 128, 2**28, True, True
        ),
    )
    of_choices = ends[:, None]
    yield (
        "moe_permute of far rows",
        lambda: moe._copy_tokens_to_rows(rows, rows, None, of_choices, ends, of_choices.numel(), False),
    )
    yield "moe_unpermute of far rows", lambda: moe.sum_rows_and_gather_scalars(rows, None, None, of_choices)
    yield "grouped_gemm of far rows", lambda: grouped_gemm._multiply_rows_by_expert(rows, matrices, ends)
    yield "grouped_gemm of weights of far rows", lambda: grouped_gemm._sum_outer_products_by_expert(rows, rows, ends)
    yield "add_expert_bias of far rows", lambda: grouped_gemm._add_bias_by_expert(rows, rows, ends, numbers)
    yield "expert_bias_sums of far rows", lambda: grouped_gemm._sum_rows_by_expert(rows, ends, numbers)
    yield "expert_bias_products of far rows", lambda: grouped_gemm._sum_bias_products_by_row(rows, rows, ends, numbers)


def losses() -> Iterator[tuple[str, Launch]]:
    logits, numbers, targets = empty(4, 151936), empty(256, dtype=FLOAT), torch.zeros(256, dtype=torch.int64)
    hidden, weight = empty(256, 128), empty(512, 128)
    backward = hidden, weight, targets, numbers, numbers
    for factors in (None, numbers[:4]):
        yield (
            f"linear_cross_entropy{'' if factors is None else ' in chunks'}",
            lambda f=factors: cross_entropy._fill_losses_and_grad_logits(
                logits, targets[:4], numbers[:4], numbers[:4], f, -100, True
            ),
        )
    forward = cross_entropy._forward
    yield "cut_cross_entropy", lambda: forward(hidden, weight, targets, 128, 256, 2**28)
    wide, words = hidden.float(), weight.float()
    yield "cut_cross_entropy float32", lambda: cross_entropy._forward(wide, words, targets, 32, 256, 2**28)
    for least in (0.0, 1e-4):
        yield (
            f"cut_cross_entropy backward float32 {least}",
            lambda e=least: cross_entropy._backward(
                wide, words, targets, numbers, numbers, None, e, 32, 256, 2**28, True, True
            ),
        )
    yield "cut_cross_entropy by blocks", _with_tma(lambda: forward(hidden, weight, targets, 128, 256, 2**28))
    for least, grad_lse in product((0.0, 1e-4), (None, numbers)):
        name, rest = f"cut_cross_entropy backward {least}", (grad_lse, least, 128, 256, 2**28, True, True)
        name += "" if grad_lse is None else " with lse"
        yield name, lambda r=rest: cross_entropy._backward(*backward, *r)
        yield f"{name} by blocks", _with_tma(lambda r=rest: cross_entropy._backward(*backward, *r))


def experts() -> Iterator[tuple[str, Launch]]:
    expert_indices, ends = torch.zeros(64, 8, dtype=torch.int64), torch.zeros(128, dtype=torch.int32)
    x, rows, chances = empty(64, 2048), empty(512, 2048), empty(64, 8, dtype=FLOAT)
    of_choices = expert_indices.to(torch.int32)
    yield "moe_routes", lambda: moe._compute_routes(expert_indices, 128)
    yield (
        "moe_permute",
        lambda: moe._copy_tokens_to_rows(x, None, chances, of_choices, ends, of_choices.numel(), False),
    )
    yield (
        "moe_permute backward",
        lambda: moe.sum_rows_and_gather_scalars(rows, None, chances.flatten(), of_choices),
    )
    yield "moe_unpermute", lambda: moe.sum_rows_and_gather_scalars(rows, chances, None, of_choices)
    yield (
        "moe_unpermute backward",
        lambda: moe._copy_tokens_to_rows(x, rows, chances, of_choices, ends, of_choices.numel(), True),
    )
    for dtype in (BF16, FLOAT):
        biased, biases, scale = empty(512, 2880, dtype=dtype), empty(32, 2880, dtype=dtype), empty(512, dtype=FLOAT)
        for factors in (None, scale):
            kind = f"{dtype}{'' if factors is None else ' scaled'}"
            yield (
                f"add_expert_bias {kind}",
                lambda x=biased, b=biases, f=factors: grouped_gemm._add_bias_by_expert(x, b, ends[:32], f),
            )
            yield (
                f"expert_bias_sums {kind}",
                lambda x=biased, f=factors: grouped_gemm._sum_rows_by_expert(x, ends[:32], f),
            )
        yield (
            f"expert_bias_products {dtype}",
            lambda x=biased, b=biases, f=scale: grouped_gemm._sum_bias_products_by_row(x, b, ends[:32], f),
        )
    for count in (4096, 512):
        a, b, weight = empty(count, 512), empty(count, 256), empty(16, 512, 256)
        yield f"grouped_gemm {count}", lambda a=a, w=weight: grouped_gemm._multiply_rows_by_expert(a, w, ends[:16])
        yield (
            f"grouped_gemm of inputs {count}",
            lambda b=b, w=weight: grouped_gemm._multiply_rows_by_expert(b, w.transpose(1, 2), ends[:16]),
        )
        yield (
            f"grouped_gemm of weights {count}",
            lambda a=a, b=b: grouped_gemm._sum_outer_products_by_expert(a, b, ends[:16]),
        )
    a, b, weight = (x.float() for x in (empty(64, 512), empty(64, 256), empty(16, 512, 256)))
    for tf32 in (False, True):
        name = f"grouped_gemm float32{' by TF32' if tf32 else ''}"
        yield name, _with_tf32(tf32, lambda a=a, w=weight: grouped_gemm._multiply_rows_by_expert(a, w, ends[:16]))
        yield (
            f"{name} of weights",
            _with_tf32(tf32, lambda a=a, b=b: grouped_gemm._sum_outer_products_by_expert(a, b, ends[:16])),
        )
    a, b, product = empty(4096, 512), empty(4096, 256), empty(16, 512, 256)
    few, by_blocks = ends[:16], grouped_gemm.multiply_rows_by_tma
    yield "grouped_gemm by blocks", lambda: by_blocks(a, product, few, b)
    yield "grouped_gemm of inputs by blocks", lambda: by_blocks(b, product.transpose(1, 2), few, a)
    yield "grouped_gemm of weights by blocks", lambda: grouped_gemm.sum_outer_products_by_tma(a, b, few, product)


def exchanges() -> Iterator[tuple[str, Launch]]:
    exchange, slots = moe.moe_peers_triton, 64
    addresses, ends = torch.zeros(2, dtype=torch.int64), torch.zeros(16, dtype=torch.int32)
    choices, scalars = torch.zeros(slots, 8, dtype=torch.int32), empty(slots, 8, dtype=FLOAT)
    routes = Routes(torch.zeros(2 * slots, 8, dtype=torch.int32), torch.zeros(512, dtype=torch.int32), ends)
    of_scalars, of_choices = ([scalars] * 2, addresses), ([choices] * 2, addresses)
    yield "moe_peers choices", lambda: exchange.localize_choices(of_choices, 16, 16)
    yield "moe_peers limit", lambda: exchange.limit_routes_and_flag_overflow(routes, 256, ends[:1])
    for dtype in (BF16, FLOAT):
        hidden, rows = empty(slots, 2048, dtype=dtype), empty(512, 2048, dtype=dtype)
        tokens, sums = ([hidden] * 2, addresses), empty(2 * slots, 2048, dtype=dtype)
        values, own = [hidden, scalars, choices.long()], [hidden, scalars, choices]
        yield f"moe_peers write {dtype}", lambda v=values, o=own: exchange.write_tokens_to_slots(v, o)
        yield f"moe_peers read {dtype}", lambda t=tokens: exchange.read_rows_and_scalars(t, of_scalars, routes)
        yield (
            f"moe_peers sums {dtype}",
            lambda r=rows, s=sums: exchange.publish_token_sums(r, None, routes.dest_row, s, None),
        )
        yield (
            f"moe_peers read sums {dtype}",
            lambda t=([sums] * 2, addresses): exchange.read_token_sums_and_scalars(t, of_scalars, choices, 16, 16),
        )


def casts() -> Iterator[tuple[str, Launch]]:
    for width in (3072, 4096):
        both, grad, factor = empty(64, 2 * width), empty(64, width), empty(2 * width, dtype=FLOAT)
        yield f"float8 swiglu {width}", lambda b=both: float8._quantize_swiglu(b)
        yield f"float8 quantize {width}", lambda g=grad: float8._quantize_rows(g)
        for scale in (None, empty(64, dtype=FLOAT)):
            name = f"{width}{' by rows' if scale is None else ''}"
            yield (
                f"float8 swiglu gradient {name}",
                lambda g=grad, b=both, f=factor, s=scale: float8._quantize_swiglu_gradient(g, b, f, s),
            )
            yield (
                f"float8 gradient {name}",
                lambda g=grad, f=factor[:width], s=scale: float8._quantize_gradient([g], f, s),
            )
    for name, weight_format in FORMATS.items():
        stored = empty(64, 4 * weight_format.units, dtype=STORAGE)
        yield f"dequantize {name}", lambda s=stored, n=name: weight_formats._dequantize(s, n)
    tokens, rows, ends = empty(64, 1024, dtype=E4M3), empty(512, 384, dtype=E4M3), torch.zeros(16, dtype=torch.int32)
    scale, choices, both = empty(512, dtype=FLOAT), torch.zeros(512, dtype=torch.int32), empty(512, 768)
    weight, rounded, by_expert = empty(16, 1024, 384), empty(16, 1024, 384, dtype=E4M3), empty(16, dtype=FLOAT)
    yield (
        "float8 take",
        lambda: float8._copy_tokens_to_expert_rows(tokens, scale[:64], empty(64, 8, dtype=FLOAT), choices, 8),
    )
    yield "float8 experts' weights", lambda: float8._quantize_experts(weight)
    yield (
        "float8 experts' weights transposed",
        lambda: float8._quantize_transposed_experts(weight, by_expert),
    )
    yield "float8 experts' swiglu", lambda: float8._quantize_expert_swiglu(both, scale)
    yield (
        "float8 experts' swiglu gradient",
        lambda: float8._quantize_expert_swiglu_gradient(both[:, :384], both, scale),
    )
    for indices in (None, choices):
        yield (
            f"float8 experts' factors {'' if indices is None else 'of tokens'}",
            lambda i=indices: float8._prepare_outer_product_factors(rows, scale, tokens, scale, i, 8, ends),
        )
    for fast in (True, False):
        yield (
            f"float8 experts' products {fast}",
            lambda f=fast: float8._multiply_rows(rows, scale, rounded, by_expert, ends, f),
        )
    factors = empty(384, 2560, dtype=E4M3), empty(1024, 2560, dtype=E4M3)
    yield "float8 experts' gradients", lambda: float8._sum_outer_products(*factors, by_expert, ends)


def recurrences() -> Iterator[tuple[str, Launch]]:
    for width, v_width, dtype in [(128, 128, BF16), (96, 192, BF16), (256, 256, BF16), (64, 64, FLOAT)]:
        q, v = empty(2, 200, 2, width, dtype=dtype), empty(2, 200, 4, v_width, dtype=dtype)
        g, beta = empty(2, 200, 4, dtype=FLOAT), empty(2, 200, 4, dtype=dtype)
        ids, before = torch.zeros(2, 200, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
        solved = empty(2, 200, 4, dtype=FLOAT), empty(2, 200, 4, 64, dtype=dtype), torch.empty_like(v)
        last, name = empty(2, 4, width, v_width, dtype=FLOAT), f"gated_delta_rule {width}/{v_width} {dtype}"
        pairs = product((None, last), (False, True)) if width == 128 else ((None, False), (last, True))
        for state, by_channel in pairs:
            decays = empty(2, 200, 4, width, dtype=FLOAT) if by_channel else g
            inputs, saved = (q, q, v, decays, beta, ids, before, state), (solved[int(by_channel)], *solved[1:])
            full_name = f"{name} state {state is not None}{' by channel' if by_channel else ''}"
            yield full_name, lambda inputs=inputs: gated_delta._forward(*inputs)
            yield (
                f"{full_name} backward",
                lambda v=v, last=last, inputs=inputs, saved=saved: gated_delta._backward(v, last, *inputs, *saved),
            )
        for state in (None, last) if width <= state_space.MAX_WIDTH else ():
            space = q, q, v, g, ids, before, state
            name = f"state_space {width}/{v_width} {dtype} state {state is not None}"
            yield name, lambda space=space: state_space._forward(*space)
            yield f"{name} backward", lambda v=v, last=last, space=space: state_space._backward(v, last, *space)
    for dtype, silu in ((BF16, True), (FLOAT, True), (BF16, False)):
        x, weight, ids = empty(2, 200, 4096, dtype=dtype), empty(4096, 4, dtype=dtype), empty(2, 200, dtype=torch.int32)
        convolved = x, weight, ids, silu
        yield f"causal_conv {dtype} {silu}", lambda convolved=convolved: gated_delta._causal_conv(*convolved)
        yield (
            f"causal_conv {dtype} {silu} backward",
            lambda x=x, convolved=convolved: gated_delta._causal_conv_backward(x, *convolved),
        )
