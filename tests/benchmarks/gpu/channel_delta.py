"""
The gated delta rule with decays by channel, in plain torch, beside our kernel for decays by head.

`make bench NAME=channel_delta` prints the milliseconds of both passes and the peak memory, at 8 rows of 4096.
"""

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gpu.clock import cost
from drawloom.kernels.channel_delta.eager import channel_delta_rule_eager
from drawloom.kernels.documents import number_recurrent_documents
from drawloom.kernels.gated_delta.triton import delta_rule_triton
from support.recurrences import Inputs


def main() -> None:
    """Print a line per rule."""
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here")
    rows, length, heads, width = 8, 4096, 32, 128
    torch.manual_seed(0)
    documents = number_recurrent_documents(torch.zeros(rows, length, dtype=torch.int64, device="cuda"))

    def draw(*sizes: int) -> Tensor:
        return torch.randn(rows, length, heads, *sizes, device="cuda", dtype=torch.bfloat16)

    q, k = (torch.nn.functional.normalize(draw(width), dim=-1) for _ in range(2))
    beta = draw().sigmoid()
    rules: dict[str, tuple[Callable[..., tuple[Tensor, Tensor]], Tensor]] = {
        "by head, Triton": (delta_rule_triton, -draw().float().abs()),
        "by channel, torch": (channel_delta_rule_eager, -draw(width).float().abs()),
    }
    for name, (rule, g) in rules.items():
        inputs = Inputs(q, k, draw(width), g, beta).learned()

        def run(rule: Callable[..., tuple[Tensor, Tensor]] = rule, inputs: Inputs = inputs) -> None:
            mixed, _ = rule(*inputs, documents)
            torch.autograd.grad(mixed.float().square().sum(), inputs)

        spent = cost(run)
        print(f"{name}: {spent.milliseconds:.1f} ms in both passes, {spent.mebibytes / 1024:.1f} GiB", flush=True)


if __name__ == "__main__":
    main()
