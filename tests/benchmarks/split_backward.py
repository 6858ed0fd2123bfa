"""
What going backward in two passes costs: the time of both over that of one, beside torch's own.

The same Qwen3 stage is built of our operations and of torch's; torch.distributed.pipelining splits the latter, and
stages of linear layers, with and without autocast, and of convolutions. Rounds are interleaved, each ratio is that of
two passes to the one just before them, and the middle one counts (quartiles in brackets). CPU time. Nothing is
collected while the clock runs, and freed memory is kept, as an accelerator's allocator keeps it: otherwise the price of
fresh pages, which depends on what was freed before, drowns the rest.
"""

import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from drawloom.components.model.qwen3.dense import Qwen3Dense
from drawloom.components.pipeline.split_backward.split_backward import SplitBackward
from drawloom.components.pipeline.split_backward.weight_grads import WeightGrads
from drawloom.components.ports.cache import KeyValueCache
from drawloom.components.ports.model import LayerRange, TokenContext
from drawloom.kernels.attention import attention_eager, causal_document_mask
from support.qwen3 import cpu_kernels

SIZES = [(128, 2, 64), (128, 8, 64), (256, 4, 64)]
"""Width, rows, length."""

ROUNDS = 21
GOAL = 1.05
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


class TorchKernels:
    """A model's operations, each the one that torch offers."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        (a, b), cos, sin = x.chunk(2, -1), cos.unsqueeze(-2), sin.unsqueeze(-2)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        summed = x + residual
        return self.rms_norm(summed, weight, eps), summed

    def qk_norm_rope(
        self, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        normed = self.rms_norm(q, q_weight, eps), self.rms_norm(k, k_weight, eps)
        return self.rope(normed[0], cos, sin), self.rope(normed[1], cos, sin)

    def attention_mask(
        self,
        documents: Tensor,
        window: int | None = None,
        part: Any = None,
        cache: KeyValueCache | None = None,
        whole_rows: bool = False,
    ) -> Tensor:
        return causal_document_mask(documents)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return attention_eager(q, k, v, mask)


@attrs.define
class Times:
    """Seconds of CPU time of the pass for inputs, of that for weights, and of both in one."""

    inputs: list[float] = attrs.field(factory=list)
    weights: list[float] = attrs.field(factory=list)
    whole: list[float] = attrs.field(factory=list)

    def ratios(self) -> list[float]:
        """Two passes over one, by round."""
        return [(i + w) / b for i, w, b in zip(self.inputs, self.weights, self.whole, strict=True)]


class Subject:
    """A stage, with a way to go backward in two passes."""

    def __init__(self, module: nn.Module, x: Tensor, *shared: Any, by_torch: bool, autocast: bool = False) -> None:
        self.module, self.shared, self.autocast = module, shared, autocast
        self.parameters = list(module.parameters())
        self.weights = WeightGrads()  # of all microbatches, as in a step
        self.x = x.requires_grad_()
        self.grad = torch.randn_like(self.forward())
        self.two_passes = self.by_torch if by_torch else self.by_us

    def forward(self) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return self.module(self.x, *self.shared)  # type: ignore[no-any-return]

    def clear(self, fresh: bool) -> None:
        """Set gradients to none, or to zeros that are added to."""
        self.x.grad = None
        for parameter in self.parameters:
            parameter.grad = None if fresh else torch.zeros_like(parameter)

    def one_pass(self) -> tuple[float, ...]:
        output = self.forward()
        return timed(lambda: torch.autograd.backward(output, self.grad))

    def by_us(self) -> tuple[float, ...]:
        split = SplitBackward(self.weights)
        with split.forward():
            output = self.forward()
        return timed(lambda: split.backward_input([output], [self.grad], [self.x]), split.backward_weight)

    def by_torch(self) -> tuple[float, ...]:
        output, groups = self.forward(), []
        return timed(
            lambda: groups.extend(stage_backward_input([output], [self.grad], [self.x], iter(self.parameters))[1]),
            lambda: stage_backward_weight(iter(self.parameters), groups),
        )


def of_qwen3(kernels: Any, size: tuple[int, int, int], by_torch: bool) -> Subject:
    """Eight layers of Qwen3."""
    width, rows, length = size
    model = Qwen3Dense(
        kernels=kernels,
        num_hidden_layers=8,
        hidden_size=width,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=3 * width,
        vocab_size=8,
    )
    module = model.build(LayerRange(0, 8, embedding=False, head=False))
    positions = torch.arange(length).expand(rows, -1)
    shared = TokenContext(positions, torch.zeros_like(positions))
    return Subject(module, torch.randn(rows, length, width), shared, by_torch=by_torch)


def linear(width: int, tokens: int) -> tuple[nn.Module, Tensor]:
    """Eight linear layers of torch's, and their input."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers), torch.randn(tokens, width)


def convolutions(channels: int, size: int) -> tuple[nn.Module, Tensor]:
    """Four convolutions, and their input: four images of size x size."""
    layers = [layer for _ in range(4) for layer in (nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(4, channels, size, size)


FOREIGN: dict[str, tuple[Callable[[], tuple[nn.Module, Tensor]], bool]] = {
    "linear 32, 64 tokens": (lambda: linear(32, 64), False),
    "linear 128, 512 tokens": (lambda: linear(128, 512), False),
    "linear 256, 1024 tokens": (lambda: linear(256, 1024), False),
    "autocast 256, 256 tokens": (lambda: linear(256, 256), True),
    "autocast 256, 1024 tokens": (lambda: linear(256, 1024), True),
    "conv 32, 16 x 16": (lambda: convolutions(32, 16), False),
    "conv 64, 32 x 32": (lambda: convolutions(64, 32), False),
}
"""By name, what makes a stage of layers that know nothing of two passes; and whether it computes in bfloat16."""


def timed(*actions: Callable[[], Any]) -> tuple[float, ...]:
    """Seconds of CPU time of each."""
    moments = [time.process_time()]
    for action in actions:
        action()
        moments.append(time.process_time())
    return tuple(after - before for before, after in pairwise(moments))


def measure(subjects: dict[str, Subject], fresh: bool) -> dict[str, Times]:
    """All subjects in turn, round by round; the first round only warms up."""
    found = {name: Times() for name in subjects}
    for number in range(ROUNDS + 1):
        for name, subject in subjects.items():
            subject.clear(fresh)
            (whole,) = subject.one_pass()
            subject.clear(fresh)
            inputs, weights = subject.two_passes()
            if number:
                times = found[name]
                times.inputs.append(inputs)
                times.weights.append(weights)
                times.whole.append(whole)
        gc.collect(0)
    return found


def report(name: str, size: str, fresh: bool, times: Times) -> None:
    """One line."""
    low, middle, high = statistics.quantiles(times.ratios(), n=4)
    whole, inputs, weights = (statistics.median(each) * 1e3 for each in (times.whole, times.inputs, times.weights))
    grads = "new" if fresh else "added to"
    print(
        f"{name:26} {size:26} gradients {grads:8}  "
        f"B {whole:6.2f}  I {inputs:6.2f}  W {weights:6.2f} ms  (I+W)/B {middle:5.3f} [{low:5.3f} {high:5.3f}]",
        flush=True,
    )


def main() -> None:
    """Print a line for each size, kind of gradient and way to split."""
    torch.set_num_threads(1)
    libc = ctypes.CDLL(None)
    libc.mallopt(M_TRIM_THRESHOLD, 2**30)
    libc.mallopt(M_MMAP_THRESHOLD, 2**25)
    print(f"goal: at most {GOAL} with our operations")
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for size in SIZES:
            for fresh in (True, False):
                subjects = {
                    "ours, our operations": of_qwen3(cpu_kernels(), size, by_torch=False),
                    "ours, torch's operations": of_qwen3(TorchKernels(), size, by_torch=False),
                    "torch, torch's operations": of_qwen3(TorchKernels(), size, by_torch=True),
                }
                for name, times in measure(subjects, fresh).items():
                    report(name, f"width {size[0]}, {size[1] * size[2]} tokens", fresh, times)
        for what, (make, autocast) in FOREIGN.items():
            ways = {"ours": False, "torch": True}
            subjects = {name: Subject(*make(), by_torch=way, autocast=autocast) for name, way in ways.items()}
            for name, times in measure(subjects, fresh=False).items():
                report(name, what, False, times)
    finally:
        gc.enable()
        gc.unfreeze()
