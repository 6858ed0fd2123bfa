"""The kernels of a model: for each operation the best implementation for the device, or the one of the recipe."""

from collections.abc import Iterator
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from drawloom.components.kernels.choosing import GPU, OPERATIONS, TRITON, Chosen, choose, load
from drawloom.components.ports.data import IGNORE_INDEX
from drawloom.components.ports.distributed import Device
from drawloom.graph import between, component, setting
from drawloom.graph.build.node import NodeView
from drawloom.graph.problems import Problem
from drawloom.kernels.cut_cross_entropy import Cut

Plain = Literal["auto", "eager"]
Choice = Literal["auto", "eager", "triton"]
Routes = tuple[Tensor, Tensor, Tensor]


def _operation(default: str, doc: str) -> Any:
    """The setting that names an operation's implementation."""
    return setting(default="auto", alias=default, doc=f"implementation of {doc}")


@component
class AutoKernels:
    """
    The operations that a model computes with: `eager` is plain torch, `auto` the best implementation for the device.

    `triton` compiles a kernel when it is first used. Attention by `flex` or `varlen` is torch's own for GPUs; the
    cross entropy `triton` keeps the logits' gradients, up to 2.5 GiB in bfloat16, and `cut` never keeps logits; `torch`
    is torch's grouped product.
    """

    device: Device
    _linear: Plain = _operation("linear", "linear layers")
    _embedding: Plain = _operation("embedding", "the embedding of tokens")
    _rms_norm: Choice = _operation("rms_norm", "RMSNorm")
    _add_rms_norm: Choice = _operation("add_rms_norm", "an addition with the RMSNorm of the sum")
    _swiglu: Choice = _operation("swiglu", "silu(gate) * up")
    _swiglu_halves: Choice = _operation("swiglu_halves", "silu(gate) * up of experts, whose gate and up are one tensor")
    _rope: Choice = _operation("rope", "the rotary position embedding")
    _qk_norm_rope: Choice = _operation("qk_norm_rope", "the norms and rotations of queries and keys")
    _attention: Literal["auto", "eager", "flex", "varlen"] = _operation("attention", "attention")
    _linear_cross_entropy: Literal["auto", "eager", "triton", "cut"] = _operation(
        "linear_cross_entropy", "the loss over the vocabulary"
    )
    filter_eps: float = setting(
        default=0.0, check=between(0, 1), doc="tiles of logits' gradients below it are left out by cut; 0 is exact"
    )
    _moe_routes: Choice = _operation("moe_routes", "the table of rows by expert")
    _moe_permute: Choice = _operation("moe_permute", "copies of tokens for their experts")
    _moe_unpermute: Choice = _operation("moe_unpermute", "sums of experts' rows by token")
    _grouped_gemm: Literal["auto", "eager", "torch", "triton"] = _operation("grouped_gemm", "products by expert")

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Implementations for GPUs only are a problem if the recipe names the CPU."""
        if _kind(node) == "cpu":
            for operation in OPERATIONS:
                if node.settings[operation] in TRITON | GPU:
                    text = f"{node.settings[operation]!r} runs on GPUs, and the device is the CPU"
                    yield node.fault(operation, text, "write 'auto' or 'eager'")

    @classmethod
    def notes(cls, node: NodeView) -> Iterator[str]:
        """The implementations that `auto` takes on the recipe's device, and why."""
        # Notes are shown by `explain`, also on machines without the recipe's device.
        here = "cuda" if torch.cuda.is_available() else "cpu"
        if _kind(node) == "cuda" != here:
            yield "auto: what suits the GPU; there is none here to ask"
            return
        device = torch.device(here if _kind(node) == "auto" else _kind(node))
        for operation in OPERATIONS:
            if node.settings[operation] == "auto":
                chosen = choose(operation, "auto", device)
                yield f"{operation}: auto is {chosen.name}, for {chosen.why}"

    def open(self) -> None:
        """Load the implementations; a UserError if the device can't run one."""
        _ = self._functions

    def chosen(self, operation: str) -> Chosen:
        """The implementation of an operation, and why it is this one."""
        return choose(operation, getattr(self, f"_{operation}"), self.device.device)

    @cached_property
    def _functions(self) -> dict[str, Any]:
        return {operation: load(operation, self.chosen(operation).name) for operation in OPERATIONS}

    @cached_property
    def _cross_entropy_option(self) -> Any:
        """The fourth argument of the cross entropy: which targets are ignored, or with that how logits are cut."""
        cuts = self.chosen("linear_cross_entropy").name == "cut"
        return Cut(ignore_index=IGNORE_INDEX, filter_eps=self.filter_eps) if cuts else IGNORE_INDEX

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x (..., inputs), weight (outputs, inputs); gives (..., outputs)."""
        return self._functions["linear"](x, weight)  # type: ignore[no-any-return]

    def embedding(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Integer tokens (...), weight (vocabulary, width); gives (..., width)."""
        return self._functions["embedding"](tokens, weight)  # type: ignore[no-any-return]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x (..., width), weight (width,); gives (..., width)."""
        return self._functions["rms_norm"](x, weight, eps)  # type: ignore[no-any-return]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x and residual (..., width), weight (width,); gives the norm of the sum, and the sum, both (..., width)."""
        return self._functions["add_rms_norm"](x, residual, weight, eps)  # type: ignore[no-any-return]

    def swiglu(self, gate: Tensor, up: Tensor, scale: Tensor | None = None) -> Tensor:
        """gate and up (..., width), scale (...); gives (..., width)."""
        return self._functions["swiglu"](gate, up, scale)  # type: ignore[no-any-return]

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (rows, length, heads, head_dim), cos and sin (rows, length, head_dim // 2); gives the shape of x."""
        return self._functions["rope"](x, cos, sin)  # type: ignore[no-any-return]

    def qk_norm_rope(
        self, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """q (rows, length, heads, head_dim), k (rows, length, kv_heads, head_dim), weights (head_dim,)."""
        return self._functions["qk_norm_rope"](q, k, q_weight, k_weight, eps, cos, sin)  # type: ignore[no-any-return]

    def attention_mask(self, documents: Tensor) -> Any:
        """documents int64 (rows, length); gives what `attention` takes."""
        return self._functions["attention"].mask(documents)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        """q (rows, length, heads, head_dim), k and v (rows, length, kv_heads, head_dim); gives the shape of q."""
        return self._functions["attention"].attend(q, k, v, mask)  # type: ignore[no-any-return]

    def linear_cross_entropy(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """hidden (..., width), weight (vocabulary, width), targets int64 (...); losses and lse, float32 (...)."""
        function, option = self._functions["linear_cross_entropy"], self._cross_entropy_option
        return function(hidden, weight, targets, option, token_weights)  # type: ignore[no-any-return]

    def swiglu_halves(self, both: Tensor, scale: Tensor | None = None) -> Tensor:
        """both (..., 2 * width), scale (...); gives (..., width)."""
        return self._functions["swiglu_halves"](both, scale)  # type: ignore[no-any-return]

    def moe_routes(self, experts_of: Tensor, experts: int) -> Routes:
        """experts_of, integers (tokens, choices); gives three int32 tensors: see the port."""
        return self._functions["moe_routes"](experts_of, experts)  # type: ignore[no-any-return]

    def moe_permute(self, x: Tensor, probabilities: Tensor, routes: Routes) -> tuple[Tensor, Tensor]:
        """x (tokens, width), probabilities (tokens, choices); gives (tokens * choices, width), (tokens * choices,)."""
        return self._functions["moe_permute"](x, probabilities, routes)  # type: ignore[no-any-return]

    def moe_unpermute(self, rows: Tensor, routes: Routes, probabilities: Tensor | None = None) -> Tensor:
        """rows (tokens * choices, width), probabilities (tokens, choices); gives (tokens, width)."""
        return self._functions["moe_unpermute"](rows, routes, probabilities)  # type: ignore[no-any-return]

    def grouped_gemm(self, x: Tensor, weight: Tensor, ends: Tensor, transposed: bool = False) -> Tensor:
        """x (rows, inputs), weight (experts, inputs, outputs), ends int32 (experts,); gives (rows, outputs)."""
        return self._functions["grouped_gemm"](x, weight, ends, transposed)  # type: ignore[no-any-return]


def _kind(node: NodeView) -> str:
    """The kind of device that the recipe names: auto, cpu or cuda."""
    kinds = [device.settings.get("kind") for device in node.neighbours("device")]
    return str(kinds[0]) if kinds and kinds[0] else "auto"
