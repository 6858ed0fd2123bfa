"""The same operations by other libraries, if installed. Functions accept the arguments of our operations."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

INSTALL = {
    "liger_kernel": "pip install liger-kernel==0.8.5",
    "cut_cross_entropy": "pip install cut-cross-entropy",
    "d9d": "pip install d9d==0.24.0",
}
NAMES = {"liger": "liger_kernel", "cce": "cut_cross_entropy", "d9d": "d9d"}
"""Name in the table -> package."""

Function = Callable[..., Any]


def missing_packages() -> dict[str, str]:
    """Return the missing packages and their install commands. PYTHONPATH may add another environment."""
    return {module: command for module, command in INSTALL.items() if find_spec(module) is None}


def allow_fla_backward() -> None:
    """
    Let flash-linear-attention run its backward pass on Hopper with any Triton, if it is installed.

    It rejects Triton 3.4 to 3.7.0 there, whose compiled kernels return wrong gradients; their time is still comparable.
    """
    if find_spec("fla") is not None:
        products: Any = import_module("fla.ops.common.chunk_o")
        products.TRITON_ABOVE_3_7_1 = True


def compile_candidates(benchmark: str) -> None:
    """
    Compile all launch options that flash-linear-attention tunes, by processes side by side, so that it only times them.

    A process runs `python -m BENCHMARK --compile PART PARTS`, which calls compile_part.
    """
    parts = os.cpu_count() or 1
    words = [sys.executable, "-m", benchmark, "--compile"]
    running = [subprocess.Popen([*words, str(part), str(parts)]) for part in range(parts)]
    for process in running:
        process.wait()


def compile_part(call: Callable[[], Any], part: int, parts: int) -> None:
    """Run a call, and of each kernel's launch options only a part, once each and without timing."""
    tuner: Any = import_module("triton.runtime.autotuner").Autotuner
    run_candidate, untimed = tuner._bench, [float("inf")] * 3

    def run_once(kernel: Callable[[], Any], **_options: Any) -> list[float]:
        kernel()
        return [1.0] * 3

    def run_part(self: Any, *arguments: Any, config: Any, **options: Any) -> Any:
        self.do_bench = run_once
        own = self.configs.index(config) % parts == part
        return run_candidate(self, *arguments, config=config, **options) if own else untimed

    tuner._bench = run_part
    tuner.check_disk_cache = lambda _self, _key, _configs, run_candidates: run_candidates()
    call()


def available_peers(operation: str) -> dict[str, Function]:
    """Return peer name -> function, for installed peers with the operation."""
    here = {name for name, module in NAMES.items() if find_spec(module) is not None}
    return {name: function for name, function in PEERS.get(operation, {}).items() if name in here}


def compile_function(function: Function) -> Function:
    """Compile a function with torch.compile."""
    result: Function = torch.compile(function)
    return result


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    summed = x + residual
    return rms_norm(summed, weight, eps), summed


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """GeGLU in plain torch, with the tanh approximation."""
    return F.gelu(gate, approximate="tanh") * up


def oss_swiglu(both: Tensor, scale: Tensor, alpha: float, limit: float) -> Tensor:
    """gpt-oss's gate in plain torch, of the halves of a tensor."""
    gate, up = both.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate) * scale.unsqueeze(-1)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    (a, b), cos, sin = x.chunk(2, -1), cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    return rope(rms_norm(q, q_weight, eps), cos, sin), rope(rms_norm(k, k_weight, eps), cos, sin)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.T).float(), targets, reduction="sum")


def _liger(module: str, function: str) -> Any:
    return getattr(import_module(f"liger_kernel.ops.{module}"), function).apply


def _liger_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply Liger's rope, which expects heads before positions, and tables for both halves."""
    tables = (torch.cat((table, table), -1).to(x.dtype) for table in (cos, sin))
    half = x.shape[2] // 2
    q, k = (part.transpose(1, 2) for part in (x[:, :, :half], x[:, :, half:]))
    turned: tuple[Tensor, Tensor] = _liger("rope", "LigerRopeFunction")(q, k, *tables)
    return torch.cat(turned, 1).transpose(1, 2)


def _liger_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    apply = _liger("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction")
    loss: Tensor = apply(hidden, weight, targets, None, None, -100, 0.0, 0.0, "sum")[0]
    return loss


def _cce(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    loss: Tensor = import_module("cut_cross_entropy").linear_cross_entropy(hidden, weight, targets, reduction="sum")
    return loss


def _d9d(module: str, function: str) -> Any:
    return getattr(import_module(f"d9d.kernel.{module}"), function)


def _d9d_experts(x: Tensor, probabilities: Tensor, expert_indices: Tensor, experts: int) -> Tensor:
    """Permute rows by chosen expert, and back."""
    chosen, spread = _d9d("moe.indices_to_multihot", "fused_indices_to_multihot")(
        expert_indices, probabilities, experts
    )
    permute = _d9d("moe.permute_with_probs", "moe_permute_with_probs")
    rows, of_rows, row_indices = permute(x, spread, chosen, expert_indices.numel())
    weighted = rows * of_rows.unsqueeze(-1).to(rows.dtype)
    back: Tensor = _d9d("moe.permute_with_probs", "moe_unpermute_mask")(weighted, row_indices, None, x.shape)
    return back


def _d9d_steps(weights: list[Tensor], gradients: list[Tensor], means: list[Tensor], squares: list[Tensor]) -> None:
    step = _d9d("stochastic", "adamw_stochastic_bf16_")
    for tensors in zip(weights, gradients, means, squares, strict=True):
        step(*tensors, 1e-3, 0.9, 0.95, 1e-8, 0.1, 7)


PEERS: dict[str, dict[str, Function]] = {
    "rms_norm": {
        "liger": lambda x, weight, eps: _liger("rms_norm", "LigerRMSNormFunction")(x, weight, eps, 0.0, "llama", False),
        "d9d": lambda x, weight, eps: _d9d("normalization.rms", "rms_norm")(x, weight, eps),
    },
    "add_rms_norm": {
        "liger": lambda x, residual, weight, eps: _liger("fused_add_rms_norm", "LigerFusedAddRMSNormFunction")(
            x, residual, weight, eps
        ),
    },
    "swiglu": {
        "liger": lambda gate, up: _liger("swiglu", "LigerSiLUMulFunction")(gate, up),
        "d9d": lambda gate, up: _d9d("swiglu", "silu_mul")(gate, up),
    },
    "geglu": {"liger": lambda gate, up: _liger("geglu", "LigerGELUMulFunction")(gate, up)},
    "rope": {"liger": _liger_rope},
    "linear_cross_entropy": {"liger": _liger_loss, "cce": _cce},
    "experts": {"d9d": _d9d_experts},
    "stochastic_adamw": {"d9d": _d9d_steps},
    "grouped_gemm": {
        "d9d": lambda x, weight, ends: _d9d("grouped_mm.torch", "grouped_mm")(x, weight, ends, None, None)
    },
}
