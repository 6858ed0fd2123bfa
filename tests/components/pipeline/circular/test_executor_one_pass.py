"""A forward pass with all stages in one process, and the same blocks one after another."""

import torch
from torch import Tensor

from drawloom.components.pipeline.circular.executor import (
    Buffers,
    ForwardPass,
    PendingSends,
    Ring,
    TensorMeta,
    create_exchange_token,
)
from drawloom.components.pipeline.circular.timetable import Timetable

TABLES = [
    Timetable(stages, microbatches, repeats, latency)
    for stages in (1, 2, 3, 4)
    for latency in (1, 2)
    for microbatches in (1, 2, 3, 5, 8)
    for repeats in (1, 2, 3)
]


def make_pass(table: Timetable, weights: Tensor, inputs: list[Tensor]) -> ForwardPass:
    """Return a pass whose blocks have a weight apiece, and add the microbatch number."""
    cpu, sends, stages = torch.device("cpu"), PendingSends(), range(table.stages)
    metas = [TensorMeta(tensor.shape, tensor.dtype, cpu) for tensor in inputs]

    def run_block(block: int, microbatch: int, given: Tensor) -> Tensor:
        return torch.sin(given) * weights[block] + microbatch

    buffers = Buffers.with_inputs(table, stages, inputs)
    return ForwardPass(table, Ring(), run_block, metas, buffers, sends, create_exchange_token(sends, cpu))


def make_weights_and_inputs(table: Timetable) -> tuple[Tensor, list[Tensor]]:
    """Weights of all blocks, and inputs of different lengths."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(table.stages * table.repeats, generator=generator, dtype=torch.float64)
    lengths = (2 + number % 3 for number in range(table.microbatches))
    inputs = [torch.randn(length, generator=generator, dtype=torch.float64) for length in lengths]
    return weights.requires_grad_(), [tensor.requires_grad_() for tensor in inputs]


def test_outputs_and_gradients_equal_the_blocks_in_order() -> None:
    """A pipeline with any size equals its blocks in sequence, for microbatches with any shapes."""
    for table in TABLES:
        weights, inputs = make_weights_and_inputs(table)
        expected = []
        for number, tensor in enumerate(inputs):
            for weight in weights:
                tensor = torch.sin(tensor) * weight + number
            expected.append(tensor)
        wanted = torch.autograd.grad(sum(tensor.square().sum() for tensor in expected), [weights, *inputs])  # type: ignore[arg-type]
        run = make_pass(table, weights, inputs)
        outputs = run.run()
        torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)
        torch.autograd.backward([*(tensor.square().sum() for tensor in outputs), run.token])
        torch.testing.assert_close(
            [weights.grad, *(tensor.grad for tensor in inputs)], list(wanted), rtol=1e-12, atol=1e-12
        )
