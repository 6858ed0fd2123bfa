"""
The gated delta rule with decays by channel, beside decays by head, plain torch, and fla if it is in PEERS.

`make bench NAME=channel_delta` prints, at 8 rows of 4096, the milliseconds for the forward pass and both passes, and
for reading and writing every input, result and gradient once at the rate of torch's copy kernel. Our kernels' times
follow, and the largest error in results and gradients against float64, for a part of a row.
"""

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from benchmarks.gpu.clock import copy_rate, cost, error, now, show_kernels
from benchmarks.gpu.peers import allow_fla_backward, compile_candidates, compile_part
from drawloom.kernels.documents import number_recurrent_documents
from drawloom.kernels.gated_delta.eager import delta_rule_eager
from drawloom.kernels.gated_delta.triton import delta_rule_triton
from support.recurrences import Inputs

ROWS, LENGTH, HEADS, WIDTH = 8, 4096, 32, 128
EXACT_TOKENS, EXACT_HEADS = 1024, 2
"""Tokens and heads of the first row that are compared with float64."""


def main() -> None:
    """Print lines for every rule."""
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here")
    if "--compile" in sys.argv:
        part, parts = map(int, sys.argv[-2:])
        inputs = _draw_inputs(rows=1)[1]
        compile_part(lambda: torch.autograd.grad(_call_fla(inputs).sum(), inputs), part, parts)
        return
    if find_spec("fla"):
        compile_candidates("benchmarks.gpu.channel_delta")
    rate = copy_rate(2**28)
    print(f"torch {torch.__version__} on {torch.cuda.get_device_name()}, copy {rate / 1e12:.2f} TB/s", flush=True)
    torch.manual_seed(0)
    documents = number_recurrent_documents(torch.zeros(ROWS, LENGTH, dtype=torch.int64, device="cuda"))
    by_head, by_channel = _draw_inputs(ROWS)
    strong = by_channel._replace(g=(30 * by_channel.g.detach()).requires_grad_())
    seed = _draw(ROWS, WIDTH)
    for name, inputs in (("by head", by_head), ("by channel, strong decays", strong), ("by channel", by_channel)):
        moved = sum(x.nbytes for x in inputs) + seed.nbytes
        alone, both = (bytes_moved / rate * 1e3 for bytes_moved in (moved, 3 * moved - seed.nbytes))

        def rule(inputs: Inputs = inputs) -> Tensor:
            return delta_rule_triton(*inputs, documents)[0]

        def run(rule: Callable[[], Tensor] = rule, inputs: Inputs = inputs) -> None:
            torch.autograd.grad(rule(), inputs, seed)

        print(f"\n{name}\n  floor: forwards {alone:.3f}, both {both:.3f} ms", flush=True)
        _show("drawloom, Triton", rule, inputs, seed)
        if name == "by channel" and find_spec("fla"):
            _show("fla", partial(_call_fla, inputs), inputs, seed)
        show_kernels(run, 20)
        print(f"  error {_measure_error(inputs, seed):.1e}", flush=True)
    for _ in range(2):
        start = now(True)
        torch.autograd.grad(delta_rule_eager(*by_channel, documents)[0], by_channel, seed)
        end = now(True)
        end.synchronize()
    print(f"\nby channel, plain torch: both {start.elapsed_time(end):.1f} ms", flush=True)


def _draw(rows: int, *sizes: int) -> Tensor:
    return torch.randn(rows, LENGTH, HEADS, *sizes, device="cuda", dtype=torch.bfloat16)


def _draw_inputs(rows: int) -> tuple[Inputs, Inputs]:
    """Return inputs with decays by head and by channel."""
    q, k = (torch.nn.functional.normalize(_draw(rows, WIDTH), dim=-1) for _ in range(2))
    decays, strengths = -_draw(rows).float().abs(), _draw(rows).sigmoid()
    by_head = Inputs(q * WIDTH**-0.5, k, _draw(rows, WIDTH), decays, strengths).learned()
    return by_head, by_head._replace(g=(-_draw(rows, WIDTH).float().abs()).requires_grad_())


def _call_fla(inputs: Inputs) -> Tensor:
    allow_fla_backward()
    mixed: Tensor = import_module("fla.ops.kda").chunk_kda(*inputs, scale=1.0)[0]
    return mixed


def _show(name: str, call: Callable[[], Tensor], inputs: Inputs, seed: Tensor) -> None:
    """Print a call's milliseconds and the memory for both passes."""
    with torch.no_grad():
        alone = cost(call).milliseconds
    both = cost(lambda: torch.autograd.grad(call(), inputs, seed))
    print(
        f"  {name}: forwards {alone:.3f}, both {both.milliseconds:.3f} ms, {both.mebibytes / 1024:.1f} GiB", flush=True
    )


def _measure_error(inputs: Inputs, seed: Tensor) -> float:
    """Return the largest relative error of results and gradients, for some tokens and heads."""
    part = slice(0, 1), slice(0, EXACT_TOKENS), slice(0, EXACT_HEADS)
    ours = inputs.map(lambda x: x[part]).learned()
    exact = ours.map(Tensor.double).learned()
    documents = number_recurrent_documents(torch.zeros(1, EXACT_TOKENS, dtype=torch.int64, device="cuda"))
    mixed, wanted = delta_rule_triton(*ours, documents)[0], delta_rule_eager(*exact, documents)[0]
    grads = torch.autograd.grad(mixed, ours, seed[part])
    return error([mixed, *grads], [wanted, *torch.autograd.grad(wanted, exact, seed[part].double())])


if __name__ == "__main__":
    main()
