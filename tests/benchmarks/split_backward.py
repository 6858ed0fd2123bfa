"""
Cost of a split backward pass: the CPU time of both passes over the time of one pass, compared with torch's split.

A Qwen3 stage is built from our operations and from torch's. torch.distributed.pipelining splits the latter, and also
stages of linear layers, with and without autocast, and of convolutions. Rounds are interleaved; a ratio compares two
passes with the single pass just before them; the median counts (quartiles in brackets). The garbage collector is off
and freed memory is kept, as an accelerator's allocator keeps it: otherwise the cost of fresh pages drowns the rest.
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
from drawloom.components.pipeline.split_backward.split_backward import SplitBackward, WeightGrads
from drawloom.components.ports.model import KeyValueCache, LayerRange, TokenContext
from drawloom.kernels.attention.eager import attention_eager, create_causal_document_mask
from support.qwen3 import cpu_kernels

SIZES = [(128, 2, 64), (128, 8, 64), (256, 4, 64)]
"""Width, rows, sequence length."""

ROUNDS = 21
GOAL = 1.05
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


class TorchKernels:
    """Model operations implemented by torch. Options beyond Qwen3's are ignored."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *_options: Any, **_keywords: Any) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def swiglu(self, gate: Tensor, up: Tensor, *_options: Any) -> Tensor:
        return F.silu(gate) * up

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, *_options: Any, **_keywords: Any) -> Tensor:
        (a, b), cos, sin = x.chunk(2, -1), cos.unsqueeze(-2), sin.unsqueeze(-2)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *_options: Any, **_keywords: Any
    ) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def qk_norm_rope(
        self,
        q: Tensor,
        k: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        *_options: Any,
        **_keywords: Any,
    ) -> tuple[Tensor, Tensor]:
        normed = self.rms_norm(q, q_weight, eps), self.rms_norm(k, k_weight, eps)
        return self.rope(normed[0], cos, sin), self.rope(normed[1], cos, sin)

    def attention_mask(
        self,
        documents: Tensor,
        window: int | None = None,
        part: Any = None,
        cache: KeyValueCache | None = None,
        one_document_per_row: bool = False,
    ) -> Tensor:
        return create_causal_document_mask(documents)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *_options: Any) -> Tensor:
        return attention_eager(q, k, v, mask)


@attrs.define
class Times:
    """CPU seconds of the input pass, the weight pass, and the single pass for both."""

    inputs: list[float] = attrs.field(factory=list)
    weights: list[float] = attrs.field(factory=list)
    whole: list[float] = attrs.field(factory=list)

    def ratios(self) -> list[float]:
        """Return the time for two passes divided by the time for one, per round."""
        return [(i + w) / b for i, w, b in zip(self.inputs, self.weights, self.whole, strict=True)]


class Subject:
    """A stage, and a way to split its backward pass."""

    def __init__(self, module: nn.Module, x: Tensor, *shared: Any, by_torch: bool, autocast: bool = False) -> None:
        self.module, self.shared, self.autocast = module, shared, autocast
        self.parameters = list(module.parameters())
        self.weights = WeightGrads()  # shared by all microbatches, as in a step
        self.x = x.requires_grad_()
        self.grad = torch.randn_like(self.forward())
        self.two_passes = self.by_torch if by_torch else self.by_us

    def forward(self) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return self.module(self.x, *self.shared)  # type: ignore[no-any-return]

    def clear(self, fresh: bool) -> None:
        """Set gradients to None, or to zeros that the pass adds to."""
        self.x.grad = None
        for parameter in self.parameters:
            parameter.grad = None if fresh else torch.zeros_like(parameter)

    def one_pass(self) -> tuple[float, ...]:
        output = self.forward()
        return time_actions(lambda: torch.autograd.backward(output, self.grad))

    def by_us(self) -> tuple[float, ...]:
        split = SplitBackward(self.weights)
        with split.forward_context():
            output = self.forward()
        return time_actions(lambda: split.backward_input([output], [self.grad], [self.x]), split.backward_weight)

    def by_torch(self) -> tuple[float, ...]:
        output, groups = self.forward(), []
        return time_actions(
            lambda: groups.extend(stage_backward_input([output], [self.grad], [self.x], iter(self.parameters))[1]),
            lambda: stage_backward_weight(iter(self.parameters), groups),
        )


def build_qwen3(kernels: Any, size: tuple[int, int, int], by_torch: bool) -> Subject:
    """Build eight layers of Qwen3."""
    width, rows, length = size
    sizes: dict[str, Any] = {"num_hidden_layers": 8, "hidden_size": width, "intermediate_size": 3 * width}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 8}
    model = Qwen3Dense(kernels=kernels, **sizes)
    module = model.build(LayerRange(0, 8, embedding=False, head=False))
    positions = torch.arange(length).expand(rows, -1)
    shared = TokenContext(positions, torch.zeros_like(positions))
    return Subject(module, torch.randn(rows, length, width), shared, by_torch=by_torch)


def build_linear(width: int, tokens: int) -> tuple[nn.Module, Tensor]:
    """Build eight torch linear layers, and their input."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers), torch.randn(tokens, width)


def build_convolutions(channels: int, size: int) -> tuple[nn.Module, Tensor]:
    """Build four convolutions, and their input: four images, size x size."""
    layers = [layer for _ in range(4) for layer in (nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(4, channels, size, size)


FOREIGN: dict[str, tuple[Callable[[], tuple[nn.Module, Tensor]], bool]] = {
    "linear 32, 64 tokens": (lambda: build_linear(32, 64), False),
    "linear 128, 512 tokens": (lambda: build_linear(128, 512), False),
    "linear 256, 1024 tokens": (lambda: build_linear(256, 1024), False),
    "autocast 256, 256 tokens": (lambda: build_linear(256, 256), True),
    "autocast 256, 1024 tokens": (lambda: build_linear(256, 1024), True),
    "conv 32, 16 x 16": (lambda: build_convolutions(32, 16), False),
    "conv 64, 32 x 32": (lambda: build_convolutions(64, 32), False),
}
"""Name -> builder of a stage from plain torch layers, and whether it computes in bfloat16."""


def time_actions(*actions: Callable[[], Any]) -> tuple[float, ...]:
    """Run the actions, and return the CPU seconds of every action."""
    moments = [time.process_time()]
    for action in actions:
        action()
        moments.append(time.process_time())
    return tuple(after - before for before, after in pairwise(moments))


def measure(subjects: dict[str, Subject], fresh: bool) -> dict[str, Times]:
    """Measure all subjects in turn, round by round; the first round only warms up."""
    times_by_subject = {name: Times() for name in subjects}
    for number in range(ROUNDS + 1):
        for name, subject in subjects.items():
            subject.clear(fresh)
            (whole,) = subject.one_pass()
            subject.clear(fresh)
            inputs, weights = subject.two_passes()
            if number:
                times = times_by_subject[name]
                times.inputs.append(inputs)
                times.weights.append(weights)
                times.whole.append(whole)
        gc.collect(0)
    return times_by_subject


def report(name: str, size: str, fresh: bool, times: Times) -> None:
    """Print one subject's line."""
    low, middle, high = statistics.quantiles(times.ratios(), n=4)
    whole, inputs, weights = (
        statistics.median(seconds) * 1e3 for seconds in (times.whole, times.inputs, times.weights)
    )
    grads = "new" if fresh else "added to"
    print(
        f"{name:26} {size:26} gradients {grads:8}  "
        f"B {whole:6.2f}  I {inputs:6.2f}  W {weights:6.2f} ms  (I+W)/B {middle:5.3f} [{low:5.3f} {high:5.3f}]",
        flush=True,
    )


def main() -> None:
    """Print a line per size, kind of gradient and way to split."""
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
                    "ours, our operations": build_qwen3(cpu_kernels(), size, by_torch=False),
                    "ours, torch's operations": build_qwen3(TorchKernels(), size, by_torch=False),
                    "torch, torch's operations": build_qwen3(TorchKernels(), size, by_torch=True),
                }
                for name, times in measure(subjects, fresh).items():
                    report(name, f"width {size[0]}, {size[1] * size[2]} tokens", fresh, times)
        for size_text, (make, autocast) in FOREIGN.items():
            ways = {"ours": False, "torch": True}
            subjects = {name: Subject(*make(), by_torch=way, autocast=autocast) for name, way in ways.items()}
            for name, times in measure(subjects, fresh=False).items():
                report(name, size_text, False, times)
    finally:
        gc.enable()
        gc.unfreeze()
