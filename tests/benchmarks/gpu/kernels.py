"""
Kernels compared with other libraries, in one run: `make bench NAME=kernels`.

A line reports one implementation of an operation: median forward and backward times, the share of the device's peak
(measured here by a copy and a matrix product), host time, memory beyond the inputs, and the relative error against
float32. Without a GPU, `--tiny` runs everything at sizes for Triton's interpreter.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TINY = "--tiny" in sys.argv
if TINY:
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.gpu import clock, peers  # noqa: E402
from benchmarks.gpu.rows import DEVICE, RANDOM, Row, numbers, rows  # noqa: E402

HEADS = ("forward ms", "of best", "backward ms", "of best", "host us", "MiB", "error")


def main() -> None:
    """Print every row."""
    if DEVICE.type != "cuda" and not TINY:
        sys.exit("there is no GPU here; --tiny tries the benchmark in Triton's interpreter")
    if TINY and DEVICE.type != "cuda":
        from support.interpreter import repair

        repair()
    wanted = [word for word in sys.argv[1:] if not word.startswith("--")]
    print(f"torch {torch.__version__} on {torch.cuda.get_device_name() if DEVICE.type == 'cuda' else 'a CPU'}")
    for module, hint in peers.missing_packages().items():
        print(f"{module} is not installed and is skipped: {hint}")
    bytes_, operations = clock.copy_rate(2**10 if TINY else 2**28), clock.matmul_rate(64 if TINY else 8192)
    print(f"copy {bytes_ / 1e12:.3f} TB/s, bfloat16 product {operations / 1e12:.1f} TFLOP/s\n")
    for row in rows(TINY):
        if not wanted or row.operation in wanted:
            show(row, operations if row.in_operations else bytes_)


@dataclass(frozen=True)
class Line:
    """Milliseconds and shares of the peak, forward and backward. Operations without gradients have no backward time."""

    forward: float
    share: float
    backward: float | None
    share_back: float
    spent: clock.Cost
    wrong: float | None

    def __str__(self) -> str:
        back = ["-", "-"] if self.backward is None else [f"{self.backward:.4f}", f"{self.share_back:.1%}"]
        spent = [f"{self.spent.host_microseconds:.0f}", f"{self.spent.mebibytes:.0f}"]
        cells = [f"{self.forward:.4f}", f"{self.share:.1%}", *back, *spent]
        cells.append("-" if self.wrong is None else f"{self.wrong:.1e}")
        return "".join(f"{cell:>13}" for cell in cells) + ("" if self.spent.captured else "  not captured")


def show(row: Row, rate: float) -> None:
    """Print a heading, a line per implementation, and our time relative to the best other."""
    print(f"{f'{row.operation}, {row.size}':<60}" + "".join(f"{head:>13}" for head in HEADS))
    exact = _exact(row)
    lines: dict[str, Line] = {}
    for name, function in row.functions().items():
        failure_text = ""
        try:
            lines[name] = _line(row, function, exact, rate)
        except Exception as failure:  # a failing peer is reported, and the next one runs
            failure_text = f"  {type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"[:100]
        print(f"  {name:<58}{failure_text or lines[name]}", flush=True)
    print(_verdict(row, lines), flush=True)


def _verdict(row: Row, lines: dict[str, Line]) -> str:
    ours = [line for name, line in lines.items() if name in row.ours]
    others = [line for name, line in lines.items() if name not in row.ours]
    if not ours or not others:
        return ""
    words = [f"forwards {min(line.forward for line in ours) / min(line.forward for line in others):.2f}"]
    back, back_others = ([line.backward for line in some if line.backward is not None] for some in (ours, others))
    if back and back_others:
        whole, whole_others = (min(line.forward + (line.backward or 0) for line in some) for some in (ours, others))
        words += [f"backwards {min(back) / min(back_others):.2f}", f"both {whole / whole_others:.2f}"]
    return f"  ours in times of the best other: {', '.join(words)}\n"


def _line(row: Row, function: Callable[..., Any], exact: list[Tensor] | None, rate: float) -> Line:
    RANDOM.manual_seed(0)
    learned, others = row.make()
    if not learned:
        spent = clock.cost(lambda: function(*others))
        return Line(spent.milliseconds, row.floor[0] / rate * 1e3 / spent.milliseconds, None, 0.0, spent, None)
    outputs = function(*learned, *others)
    relative_error = None if exact is None else clock.error(_results_and_gradients(outputs, learned), exact)
    # Multiplying ones takes less power, and a GPU that has more left runs faster.
    grads = [numbers(*result.shape).detach().to(result.dtype) for result in _as_list(outputs)]
    del outputs  # its graph refers to this stream, which a capture must not use

    def both() -> object:
        results = _as_list(function(*learned, *others))
        return torch.autograd.grad(results, learned, grads)

    with torch.no_grad():
        forward = clock.cost(lambda: function(*learned, *others)).milliseconds
    whole = clock.cost(both)
    backward = max(whole.milliseconds - forward, 1e-9)
    shares = (floor / rate * 1e3 / spent for floor, spent in zip(row.floor, (forward, backward), strict=True))
    return Line(forward, next(shares), backward, next(shares), whole, relative_error)


def _exact(row: Row) -> list[Tensor] | None:
    """Return results and gradients for float32 inputs, or None without a reference."""
    if row.reference is None:
        return None
    RANDOM.manual_seed(0)
    learned, others = row.make()
    wide = tuple(x.detach().float().requires_grad_() for x in learned)
    return _results_and_gradients(row.reference(*wide, *others), wide)


def _results_and_gradients(outputs: object, learned: tuple[Tensor, ...]) -> list[Tensor]:
    results = _as_list(outputs)
    return [*results, *torch.autograd.grad(results, learned, [torch.ones_like(result) for result in results])]


def _as_list(outputs: object) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)  # type: ignore[call-overload]


main()
