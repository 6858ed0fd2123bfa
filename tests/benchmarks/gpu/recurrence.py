"""
The gated delta rule compared with flash-linear-attention 0.6.0, in one run: `make bench NAME=recurrence`.

Every shape gets the forward milliseconds of both on the same packed documents, their ratio, our backward milliseconds
and the ratio to our forward pass, and the errors against float32. `--backward` measures fla's backward pass, too, which
it tunes for minutes; with Triton 3.4 to 3.7.0 on Hopper, its gradients are wrong, and only their time counts.
`--kernels` prints our kernels' times instead. `PEERS` is the path to the site-packages with fla-core.
"""

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.clock import cost, show_kernels
from benchmarks.gpu.peers import allow_fla_backward
from drawloom.kernels.documents import RecurrentDocuments, number_recurrent_documents
from drawloom.kernels.gated_delta.eager import delta_rule_eager
from drawloom.kernels.gated_delta.triton import delta_rule_triton
from support.recurrences import Inputs

DEVICE = torch.device("cuda")
ROUNDS = 3
"""Measurements per call, in turns; the median counts."""


@dataclass(frozen=True)
class Shape:
    """Rows, document lengths, numbers of key and value heads, and their widths."""

    name: str
    rows: int
    documents: tuple[int, ...]
    key_heads: int
    heads: int
    width: int
    v_width: int


TEN = 3000, 100, 2500, 1, 1999, 4000, 784, 2000, 1500, 500

SHAPES = (
    Shape("Qwen3.5: one row of 16384, one document", 1, (16384,), 16, 32, 128, 128),
    Shape("Qwen3.5: one row of 16384, ten documents", 1, TEN, 16, 32, 128, 128),
    Shape("Qwen3.5: 8 rows of 4096, one document", 8, (4096,), 16, 32, 128, 128),
    Shape("OLMo-hybrid: 4 rows of 4096, one document", 4, (4096,), 30, 30, 96, 192),
)


def main() -> None:
    """Print a line per shape and implementation."""
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here")
    print(f"torch {torch.__version__} on {torch.cuda.get_device_name()}", flush=True)
    for shape in SHAPES:
        print(f"\n{shape.name}", flush=True)
        (_show_kernels if "--kernels" in sys.argv else _show)(shape)


def _show(shape: Shape) -> None:
    inputs, ids = _draw(shape)
    documents = number_recurrent_documents(ids)
    calls: dict[str, Callable[[], Any]] = {"ours": lambda: delta_rule_triton(*inputs, documents)[0]}
    if find_spec("fla"):
        calls["fla"] = _peer(inputs, ids)
    with torch.no_grad():
        times = {name: [] for name in calls}  # type: dict[str, list[float]]
        for _ in range(ROUNDS):
            for name, call in calls.items():
                times[name].append(cost(call).milliseconds)
        errors = {name: _error(call(), inputs, documents) for name, call in calls.items()}
    forward = {name: statistics.median(numbers) for name, numbers in times.items()}
    for name, milliseconds in forward.items():
        print(f"  {name} forwards {milliseconds:.3f} ms, error {errors[name]:.1e}, all {times[name]}", flush=True)
    if "fla" in forward:
        print(f"  ratio forwards {forward['ours'] / forward['fla']:.3f}", flush=True)
    learned = inputs.map(Tensor.requires_grad_)
    calls = {"ours": lambda: delta_rule_triton(*learned, documents)[0]}
    if "--backward" in sys.argv:
        calls["fla"] = _peer(learned, ids)
    backward = {name: _measure_both_passes(call, learned) - forward[name] for name, call in calls.items()}
    print("  " + ", ".join(f"{name} backwards {milliseconds:.3f} ms" for name, milliseconds in backward.items()))
    print(f"  ours backwards is {backward['ours'] / forward['ours']:.2f} times forwards", flush=True)


def _measure_both_passes(call: Callable[[], Tensor], learned: Inputs) -> float:
    """Return the median milliseconds in both passes."""
    seed = torch.randn_like(learned.v)
    passes = [cost(lambda: torch.autograd.grad(call(), learned, seed)).milliseconds for _ in range(ROUNDS)]
    return statistics.median(passes)


def _show_kernels(shape: Shape) -> None:
    """Print our kernels' times in both passes."""
    inputs, ids = _draw(shape)
    documents, learned = number_recurrent_documents(ids), inputs.map(Tensor.requires_grad_)
    seed = torch.randn_like(inputs.v)

    def run() -> None:
        torch.autograd.grad(delta_rule_triton(*learned, documents)[0], learned, seed)

    show_kernels(run, 12)


def _draw(shape: Shape) -> tuple[Inputs, Tensor]:
    """Return a layer's q, k, v, g and beta, and the document ids (rows, length)."""
    ids = torch.arange(len(shape.documents)).repeat_interleave(torch.tensor(shape.documents)).repeat(shape.rows, 1)
    torch.manual_seed(0)
    size = ids.shape
    q, k = (torch.randn(*size, shape.key_heads, shape.width, device=DEVICE) for _ in "qk")
    v = torch.randn(*size, shape.heads, shape.v_width, device=DEVICE).bfloat16()
    q, k = (torch.nn.functional.normalize(x, dim=-1).bfloat16() for x in (q, k))
    g = -torch.empty(*size, shape.heads, device=DEVICE).exponential_(5.0)
    beta = torch.rand(*size, shape.heads, device=DEVICE).bfloat16()
    return Inputs(q * shape.width**-0.5, k, v, g, beta), ids.to(DEVICE)


def _peer(inputs: Inputs, ids: Tensor) -> Callable[[], Tensor]:
    """Return fla's call. Packed rows become one row with precomputed offsets."""
    allow_fla_backward()
    rule: Any = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule

    is_packed = bool((ids[:, 1:] != ids[:, :-1]).any())
    q, k, v, g, beta = (x.flatten(0, 1)[None] if is_packed else x for x in inputs)
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    first = starts.flatten().nonzero().flatten()
    offsets = torch.cat([first, first.new_tensor([ids.numel()])]) if is_packed else None
    return lambda: rule(q, k, v, g, beta, scale=1.0, cu_seqlens=offsets)[0].view(inputs[2].shape)


def _error(actual: Tensor, inputs: Inputs, documents: RecurrentDocuments) -> float:
    """Return the relative error in the first row and head group, against float32."""
    group = inputs[2].shape[2] // inputs[1].shape[2]
    q, k, v, g, beta = (x[:1].float() for x in inputs)
    part = RecurrentDocuments(documents.ids[:1], documents.before[:1])
    heads = (q[:, :, :1], k[:, :, :1], v[:, :, :group], g[:, :, :group], beta[:, :, :group])
    exact, _ = delta_rule_eager(*heads, part)
    return float((actual[:1, :, :group].float() - exact).norm() / exact.norm())


if __name__ == "__main__":
    main()
