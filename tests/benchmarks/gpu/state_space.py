"""
Mamba-2's recurrence at 8 rows of 4096, beside mamba-ssm if it is in PEERS: `make bench NAME=state_space`.

Lines have the milliseconds for the forward pass and both passes, and for reading and writing every input, result and
gradient once at the rate of torch's copy kernel; the kernels' own times follow, and the error.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.clock import copy_rate, cost, show_kernels
from drawloom.kernels.documents import number_recurrent_documents
from drawloom.kernels.state_space.eager import state_space_eager
from drawloom.kernels.state_space.triton import state_space_triton

SHAPES = {
    "Nemotron-H: 128 heads, 8 key heads": (128, 8, 128, 64),
    "Mamba-2 2.7B: 80 heads, 1 key head": (80, 1, 128, 64),
}
"""Value heads, key heads, and widths for keys and values."""

ROWS, LENGTH = 8, 4096


def main() -> None:
    """Print lines for every shape."""
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here")
    rate = copy_rate(2**28)
    print(f"torch {torch.__version__} on {torch.cuda.get_device_name()}, copy {rate / 1e12:.2f} TB/s", flush=True)
    for name, sizes in SHAPES.items():
        print(f"\n{name}", flush=True)
        _show(rate, *sizes)


def _show(rate: float, heads: int, key_heads: int, width: int, v_width: int) -> None:
    torch.manual_seed(0)
    documents = number_recurrent_documents(torch.zeros(ROWS, LENGTH, dtype=torch.int64, device="cuda"))
    q, k = (torch.randn(ROWS, LENGTH, key_heads, width, device="cuda").bfloat16() / width**0.5 for _ in "qk")
    v = torch.randn(ROWS, LENGTH, heads, v_width, device="cuda").bfloat16()
    steps = torch.empty(ROWS, LENGTH, heads, device="cuda").uniform_(0.001, 0.1)
    learned = [x.requires_grad_() for x in (q, k, v, -steps)]
    moved = sum(x.nbytes for x in learned) + v.nbytes
    forward, both = (count / rate * 1e3 for count in (moved, 3 * moved - v.nbytes))
    print(f"  floor: forwards {forward:.3f}, both {both:.3f} ms", flush=True)
    calls: dict[str, tuple[Callable[[], Tensor], list[Tensor]]] = {
        "drawloom, Triton": (lambda: state_space_triton(q, k, v, learned[3], documents)[0], learned),
        "drawloom, torch": (lambda: state_space_eager(q, k, v, learned[3], documents)[0], learned),
    }
    if find_spec("mamba_ssm"):
        scan: Any = import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
        rates = torch.full((heads,), -1.0, device="cuda")
        steps.requires_grad_()
        calls["mamba-ssm"] = (lambda: scan(v, steps, rates, k, q, chunk_size=256), [q, k, v, steps])
    seed = torch.randn_like(v)
    for name, (call, inputs) in calls.items():

        def run(call: Callable[[], Tensor] = call, inputs: list[Tensor] = inputs) -> None:
            torch.autograd.grad(call(), inputs, seed)

        with torch.no_grad():
            alone = cost(call).milliseconds
        spent = cost(run)
        text = f"  {name}: forwards {alone:.3f}, both {spent.milliseconds:.3f} ms"
        print(f"{text}, {spent.mebibytes / 1024:.2f} GiB", flush=True)
    part = documents._replace(ids=documents.ids[:1], before=documents.before[:1])
    exact, _ = state_space_eager(q[:1].float(), k[:1].float(), v[:1].float(), learned[3][:1], part)
    actual = calls["drawloom, Triton"][0]()[:1].float()
    print(f"  error {float((actual - exact).norm() / exact.norm()):.1e}", flush=True)
    show_kernels(lambda: torch.autograd.grad(calls["drawloom, Triton"][0](), learned, seed), 8)


if __name__ == "__main__":
    main()
