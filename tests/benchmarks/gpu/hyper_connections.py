"""
A training step with hyper-connections beside one residual stream, in a model with a billion parameters.

`make bench NAME=hyper_connections` takes 2 minutes. A line has the milliseconds and the GiB for a step with 4 rows of
4096 tokens (forward and backward pass, and AdamW), also with compiled layers, and the share that hyper-connections add.
The slowest kernels follow.
"""

import sys
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.clock import show_kernels, step_cost
from drawloom.components.model.pattern import Pattern
from drawloom.components.ports.model import LayerRange, TokenContext
from support.qwen3 import kernels_on, losses_of, one_document, to

ROWS, LENGTH = 4, 4096
DEVICE = torch.device("cuda")
SIZES: dict[str, Any] = {
    "layers": "attention",
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 8192,
    "vocab_size": 32768,
}
RESIDUALS = ("plain", "hyper", "constrained")


def main() -> None:
    """Print a line for every kind, without and with torch.compile."""
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here")
    print(f"torch {torch.__version__} on {torch.cuda.get_device_name()}", flush=True)
    for compiled in (False, True):
        plain = 0.0
        for residual in RESIDUALS:
            name = f"{residual}{', compiled' if compiled else ''}"
            try:
                seconds = _show(name, residual, compiled, plain)
            except Exception as problem:
                print(f"{name}: {type(problem).__name__}: {str(problem)[:200]}", flush=True)
                continue
            plain = plain or seconds
            torch.cuda.empty_cache()


def _show(name: str, residual: str, compiled: bool, plain: float) -> float:
    """Print a line and the slowest kernels; return a step's seconds."""
    torch.manual_seed(0)
    kernels = kernels_on(DEVICE)
    sizes: dict[str, Any] = SIZES | {"residual": residual}
    model = Pattern(kernels=kernels, **sizes)
    with DEVICE:
        module: Any = model.build(LayerRange.of_whole_model(model.num_hidden_layers)).bfloat16()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.02)
    if compiled:
        kernels.import_operations()
        for layer in module.model.layers.values():
            layer.compile()
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    tokens, targets = torch.randint(model.vocab_size, (2, ROWS, LENGTH), device=DEVICE)
    step = partial(_step, module, optimizer, to(DEVICE, one_document(ROWS, LENGTH)), tokens, targets)
    cost = step_cost(step, DEVICE)
    added = f", {1 - plain / cost.seconds:.1%} for hyper-connections" if plain else ""
    print(f"{name}: {cost.seconds * 1e3:.1f} ms, {cost.allocated:.1f} GiB{added}", flush=True)
    show_kernels(step, 12)
    return cost.seconds


def _step(module: Any, optimizer: Any, context: TokenContext, tokens: torch.Tensor, targets: torch.Tensor) -> None:
    losses_of(module, tokens, context, targets).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    main()
