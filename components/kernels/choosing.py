"""Implementations for every operation, and the choice for a device."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import attrs
import torch

from drawloom import UserError

KERNELS = "drawloom.kernels"


@attrs.frozen
class Operation:
    """
    An operation's implementations, from name to `module.function` below drawloom.kernels; `doc` says what it computes.

    On a GPU, `auto` chooses the first name in `on_gpu` supported on the GPU. An attention implementation is an object
    with functions for attention and for its mask.
    """

    doc: str
    implementations: Mapping[str, str]
    on_gpu: tuple[str, ...] = ("triton", "eager")


def _create_operation(doc: str, folder: str, function: str, **others: str) -> Operation:
    """Return an operation with implementations in plain torch, in Triton, and others, `module.function` in `folder`."""
    names = {name: f"{name}.{function}_{name}" for name in ("eager", "triton")} | others
    return Operation(doc, {name: f"{folder}.{path}" for name, path in names.items()})


OPERATIONS = {
    "dequantize": _create_operation("the dequantization of frozen weights", "weight_formats", "dequantize"),
    "rms_norm": _create_operation("RMSNorm", "rms_norm", "rms_norm"),
    "add_rms_norm": _create_operation("an addition with the RMSNorm of the sum", "rms_norm", "add_rms_norm"),
    "swiglu": _create_operation("silu(gate) * up", "gates", "swiglu"),
    "swiglu_halves": _create_operation("silu(gate) * up of one tensor's halves", "gates", "swiglu_halves"),
    "geglu": _create_operation("gelu(gate) * up", "gates", "geglu"),
    "oss_swiglu_halves": _create_operation(
        "gpt-oss's clamped SwiGLU, gate and up in one tensor", "gates", "oss_swiglu_halves"
    ),
    "rope": _create_operation("the rotary position embedding", "rope", "rope"),
    "qk_norm_rope": _create_operation("the norms and rotations of queries and keys", "rope", "qk_norm_rope"),
    "attention": Operation(
        "attention",
        {
            "eager": "attention.eager.EAGER",
            "cudnn": "attention.cudnn.CUDNN",
            "flex": "attention.flex.FLEX",
            "varlen": "attention.flash.VARLEN",
            "tree": "attention.tree.TREE",
        },
        ("cudnn", "flex", "eager"),
    ),
    "choose_keys": _create_operation("an indexer's choice of keys", "sparse_attention", "choose_keys"),
    "sparse_attention": _create_operation("attention to chosen keys", "sparse_attention", "sparse_attention"),
    "causal_conv": _create_operation("the convolution over tokens in recurrent layers", "gated_delta", "causal_conv"),
    "gated_delta_rule": _create_operation("the gated delta rule in recurrent layers", "gated_delta", "delta_rule"),
    "state_space": _create_operation("Mamba-2's recurrence", "state_space", "state_space"),
    "connect_streams": _create_operation("hyper-connections", "hyper_connections", "connect_streams"),
    "linear_cross_entropy": _create_operation(
        "the loss over the vocabulary", "cross_entropy", "linear_cross_entropy", cut="triton.cut_cross_entropy_triton"
    ),
    "moe_routes": _create_operation("the routes from tokens to experts", "moe", "moe_routes"),
    "moe_permute": _create_operation("copies of tokens for their experts", "moe", "moe_permute"),
    "moe_unpermute": _create_operation("sums of expert rows by token", "moe", "moe_unpermute"),
    "moe_peers": _create_operation("copies and sums of tokens in the memory of other ranks", "moe", "moe_peers"),
    "grouped_gemm": _create_operation(
        "the matrix products of experts", "grouped_gemm", "grouped_gemm", torch="eager.grouped_gemm_torch"
    ),
    "add_expert_bias": _create_operation("the addition of experts' biases", "grouped_gemm", "add_expert_bias"),
}

PLAIN = {
    "linear": "linear.linear_eager",
    "embedding": "linear.embedding_eager",
    "linear_quantized": "weight_formats.eager.linear_quantized",
    "multiply_quantized_experts": "weight_formats.eager.multiply_quantized_experts",
    "causal_mask": "attention.eager.create_causal_mask",
    "attend_to_cached": "attention.eager.attention_eager",
}
"""Functions with one implementation, `module.function` below drawloom.kernels."""

TRITON = {"triton", "cut", "cudnn", "flex"}
"""Implementations that Triton compiles."""

GPU = {"varlen", "cudnn", "flex"}
"""Implementations whose backward pass requires a GPU."""


@attrs.frozen
class ImplementationChoice:
    """Name and reason for the chosen implementation."""

    name: str
    why: str


def choose_implementation(operation: str, wanted: str, device: torch.device) -> ImplementationChoice:
    """
    Choose an implementation for a device. Raises UserError if the requested one can't run there.

    On a CPU `auto` is eager, whether or not Triton is installed.
    """
    if wanted != "auto":
        if problem := find_unavailable_reason(wanted, device):
            raise UserError(f"kernels.auto: {operation} is {wanted!r}, but {problem}; write {operation} = 'auto'", 2)
        return ImplementationChoice(wanted, "the recipe says so")
    if device.type == "cpu":
        return ImplementationChoice("eager", "the device is the CPU")
    problems = [(name, find_unavailable_reason(name, device)) for name in OPERATIONS[operation].on_gpu]
    name = next(name for name, problem in problems if not problem)
    reasons = [f"not {other}, for {problem}" for other, problem in problems if problem]
    return ImplementationChoice(name, "; ".join(reasons) or "the device is a GPU")


def find_unavailable_reason(implementation: str, device: torch.device) -> str:
    """Return why an implementation can't run on a device, or an empty string if it can."""
    if implementation in GPU and device.type == "cpu":
        return "its backward pass runs on GPUs, and the device is the CPU"
    if implementation not in TRITON:
        return ""
    from drawloom.kernels.availability import why_no_triton  # a check on a CPU need not know

    return why_no_triton(device)


def load_implementation(operation: str, implementation: str) -> Any:
    """Return an implementation's function."""
    return load_function(OPERATIONS[operation].implementations[implementation])


def load_function(path: str) -> Any:
    """Return a function from `module.function` below drawloom.kernels."""
    # Modules are imported on demand, so that a check imports no kernel, and a run on a CPU never imports triton.
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"{KERNELS}.{module}"), name)
