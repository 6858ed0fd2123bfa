"""
Kernels beside those of others, in one run: `make bench-gpu`.

Each line is one implementation of one operation: median time forwards and backwards, the share of what the device can
do at most (measured here: bytes of a copy, operations of a matrix product), time of the host, memory beyond the inputs,
and the relative error against float32. `--tiny` does it all at sizes for Triton's interpreter, where there is no GPU.
"""

import os
import sys

TINY = "--tiny" in sys.argv
if TINY:
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.gpu import clock, peers  # noqa: E402
from benchmarks.gpu.rows import DEVICE, Row, rows  # noqa: E402

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
    for module, how in peers.absent().items():
        print(f"{module} is absent, and left out: {how}")
    bytes_, operations = clock.copy_rate(2**10 if TINY else 2**28), clock.matmul_rate(64 if TINY else 8192)
    print(f"copy {bytes_ / 1e12:.3f} TB/s, bfloat16 product {operations / 1e12:.1f} TFLOP/s\n")
    for row in rows(TINY):
        if not wanted or row.operation in wanted:
            show(row, operations if row.in_operations else bytes_)


def show(row: Row, rate: float) -> None:
    """A heading, and a line for each implementation."""
    print(f"{f'{row.operation}, {row.size}':<60}" + "".join(f"{head:>13}" for head in HEADS))
    exact = _exact(row)
    for name, function in row.functions().items():
        try:
            line = _line(row, function, exact, rate)
        except Exception as failure:  # a peer that does not run here is said so, and the others go on
            line = f"  {type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"[:100]
        print(f"  {name:<58}{line}", flush=True)
    print()


def _line(row: Row, function: object, exact: list[Tensor] | None, rate: float) -> str:
    torch.manual_seed(0)
    learned, others = row.make()
    if not learned:
        spent = clock.cost(lambda: function(*others))  # type: ignore[operator]
        return _cells(spent.milliseconds, row.floor[0] / rate, None, 0, spent, None)
    found = function(*learned, *others)  # type: ignore[operator]
    grads = [torch.ones_like(result) for result in _several(found)]
    wrong = None if exact is None else clock.error(_all(found, learned), exact)

    def both() -> object:
        results = _several(function(*learned, *others))  # type: ignore[operator]
        return torch.autograd.grad(results, learned, grads)

    with torch.no_grad():
        forward = clock.cost(lambda: function(*learned, *others))  # type: ignore[operator]
    whole = clock.cost(both)
    backward = whole.milliseconds - forward.milliseconds
    return _cells(forward.milliseconds, row.floor[0] / rate, backward, row.floor[1] / rate, whole, wrong)


def _cells(
    forward: float, floor: float, backward: float | None, floor_back: float, spent: clock.Cost, wrong: float | None
) -> str:
    cells = [f"{forward:.4f}", f"{floor * 1e3 / forward:.1%}"]
    cells += ["-", "-"] if backward is None else [f"{backward:.4f}", f"{floor_back * 1e3 / max(backward, 1e-9):.1%}"]
    cells += [f"{spent.host_microseconds:.0f}", f"{spent.mebibytes:.0f}", "-" if wrong is None else f"{wrong:.1e}"]
    return "".join(f"{cell:>13}" for cell in cells) + ("" if spent.captured else "  not captured")


def _exact(row: Row) -> list[Tensor] | None:
    """Results and gradients with inputs of float32, or nothing where that says nothing."""
    if row.reference is None:
        return None
    torch.manual_seed(0)
    learned, others = row.make()
    wide = tuple(x.detach().float().requires_grad_() for x in learned)
    return _all(row.reference(*wide, *others), wide)


def _all(found: object, learned: tuple[Tensor, ...]) -> list[Tensor]:
    results = _several(found)
    return [*results, *torch.autograd.grad(results, learned, [torch.ones_like(result) for result in results])]


def _several(found: object) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)  # type: ignore[call-overload]


main()
