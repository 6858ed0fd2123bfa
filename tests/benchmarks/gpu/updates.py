"""
AdamW's updates for all weights in 8B and 14B models, beside the time their bytes need: `make bench NAME=updates`.

A line has an update's median milliseconds with random gradients and a clipping factor, the milliseconds for reading and
writing every byte once at the rate of torch's copy kernel (measured first), and their ratio. `--tiny` runs small
shapes, on a CPU in Triton's interpreter.
"""

import os
import sys
from collections.abc import Iterator
from statistics import median
from typing import Any

TINY = "--tiny" in sys.argv
if TINY:
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402

from benchmarks.gpu import clock  # noqa: E402
from drawloom.kernels.adamw.eager import (  # noqa: E402
    ZERO_CODE,
    ParamState,
    compute_scales_shape,
    compute_step_scalars,
)
from drawloom.kernels.adamw.triton import AdamwTriton  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
REPEATS = 2 if TINY else 7

MODELS = {
    "8B": (32, 128256, 4096, 14336, 1024),
    "14B": (48, 152064, 5120, 13824, 1024),
}
"""Layers, vocabulary, width, inner width and keys' width in Llama-3-8B and Qwen2.5-14B."""

KINDS = {
    "8-bit means": (torch.uint8, False, 7),
    "8-bit means, split masters": (torch.uint8, True, None),
    "bfloat16 means": (torch.bfloat16, False, 7),
}
"""The means' dtype, whether weights are split master weights, and the noise's counter."""


def main() -> None:
    """Print a line per model and state."""
    if DEVICE.type != "cuda" and not TINY:
        sys.exit("there is no GPU here; --tiny tries the benchmark in Triton's interpreter")
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    rate = clock.copy_rate(2**10 if TINY else 2**28)
    print(f"torch {torch.__version__}, copy {rate / 1e12:.3f} TB/s\n{'':<40}{'ms':>9}{'floor':>9}{'ratio':>9}")
    for (model, sizes), (kind, options) in ((a, b) for a in MODELS.items() for b in KINDS.items()):
        name = f"{model}, {kind}"
        if all(word in name for word in words):
            params = [_make_state(shape, *options[:2]) for shape in _list_shapes(*sizes)]
            moved = sum(tensor.nbytes for param in params for tensor in param.weight_and_state_tensors) * 2
            moved += sum(2 * param.weight.numel() for param in params)
            spent, floor = _measure(params, options[2]), moved / rate * 1e3
            print(f"{name:<40}{spent:>9.2f}{floor:>9.2f}{spent / floor:>9.2f}", flush=True)
            del params


def _list_shapes(layers: int, vocabulary: int, width: int, inner: int, keys: int) -> Iterator[tuple[int, int]]:
    """Yield all matrices' shapes."""
    if TINY:
        layers, vocabulary, width, inner, keys = 0, 1, 512, 0, 0
    yield from ((vocabulary, width),) * 2
    for _ in range(layers):
        yield from ((width, width), (keys, width), (keys, width), (width, width))
        yield from ((inner, width), (inner, width), (width, inner))


def _make_state(shape: tuple[int, int], dtype: torch.dtype, splits: bool) -> ParamState:
    weight = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_(0, 0.02)
    mean, square = (torch.zeros(shape, dtype=dtype, device=DEVICE) for _ in "ms")
    optional: dict[str, Any] = {}
    if splits:
        optional["remainder"] = torch.zeros(shape, dtype=torch.int16, device=DEVICE)
    if dtype == torch.uint8:
        mean.fill_(ZERO_CODE)
        for name in ("exp_avg_scale", "exp_avg_sq_scale"):
            optional[name] = torch.zeros(compute_scales_shape(shape), device=DEVICE)
    return ParamState(weight, mean, square, 0.1, 7, **optional)


def _measure(params: list[ParamState], counter: int | None) -> float:
    """Return an update's median milliseconds, after updates to fill the means."""
    gradients = [torch.empty_like(param.weight).normal_(0, 1e-3) for param in params]
    stepper = AdamwTriton(params)

    def update(step: int) -> Any:
        numbers = compute_step_scalars(3e-4, (0.9, 0.95), 1e-8, step)
        begin = clock.now(DEVICE.type == "cuda")
        stepper.step(gradients, numbers, None if counter is None else counter + step)
        return begin, clock.now(DEVICE.type == "cuda")

    for step in range(1, 4):
        update(step)
    clock.wait(DEVICE)
    spans = [update(step) for step in range(4, 4 + REPEATS)]
    clock.wait(DEVICE)
    return float(median(b.elapsed_time(e) if DEVICE.type == "cuda" else (e - b) * 1e3 for b, e in spans))


if __name__ == "__main__":
    main()
