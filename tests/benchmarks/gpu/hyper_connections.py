"""
A training step with hyper-connections beside one residual stream, in a model with a billion parameters.

`make bench NAME=hyper_connections` takes a minute and a half, and with ONLY=compiled, for compiled layers, two minutes.
A line has the milliseconds and the GiB for a step with 4 rows of 4096 tokens (forward and backward pass, and AdamW),
and the hyper-connections' share, by kernels or in plain torch (`eager`). The kernels with most additional time follow.

The least traffic, in tensors like one stream (64 MiB; 16 us at 4.2 TB/s), with n = 4 streams: a layer begins with n + 1
(it reads streams, and writes an input), goes from one branch to the next with 2 n + 2, and ends with 2 n + 1, together
24. Its backward pass has 3 n + 1, 3 n + 3 and 3 n + 2, and 2 n for the projections' gradients, together 50. These are
19 ms in 16 layers, and a plain step's 227 ms have 1.5 ms more for norms: the connections are 7.2 % or more. Were each
branch's output written without reading the next branch's input, a layer would have 10 more; if layers ended and began
in one kernel, 16 less. If second passes over streams miss the cache, kernels have up to 8 and 11 more.
"""

import sys
from functools import partial
from typing import Any, NamedTuple

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
VARIANTS = (
    *(("plain", 4, "auto"), ("hyper", 2, "auto"), ("hyper", 4, "auto")),
    *(("constrained", 2, "auto"), ("constrained", 4, "auto"), ("hyper", 4, "eager")),
)
"""Residual connections, streams, and the implementation of hyper-connections."""


def main() -> None:
    """Print a line for every variant, without or with torch.compile."""
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here")
    print(f"torch {torch.__version__} on {torch.cuda.get_device_name()}", flush=True)
    compiled, plain = "compiled" in sys.argv, Step(0.0, {})
    for residual, streams, implementation in VARIANTS:
        name = f"{residual}, {streams} streams, {implementation}{', compiled' if compiled else ''}"
        try:
            step = _show(name, {"residual": residual, "residual_streams": streams}, implementation, compiled, plain)
        except Exception as problem:
            print(f"{name}: {type(problem).__name__}: {str(problem)[:200]}", flush=True)
            continue
        plain = plain if plain.seconds else step
        torch.cuda.empty_cache()
        torch.compiler.reset()  # a layer is compiled for few shapes in a process


class Step(NamedTuple):
    """Seconds of a step, and milliseconds by kernel."""

    seconds: float
    kernels: dict[str, float]


def _show(name: str, residual: dict[str, Any], implementation: str, compiled: bool, plain: Step) -> Step:
    """Print a line for a step, and the kernels that take longer than in the plain one."""
    torch.manual_seed(0)
    kernels = kernels_on(DEVICE, connect_streams=implementation)
    sizes: dict[str, Any] = SIZES | residual
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
    added = f", {1 - plain.seconds / cost.seconds:.1%} for hyper-connections" if plain.seconds else ""
    print(f"{name}: {cost.seconds * 1e3:.1f} ms, {cost.allocated:.1f} GiB{added}", flush=True)
    return Step(cost.seconds, show_kernels(step, 6, plain.kernels))


def _step(module: Any, optimizer: Any, context: TokenContext, tokens: torch.Tensor, targets: torch.Tensor) -> None:
    losses_of(module, tokens, context, targets).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    main()
