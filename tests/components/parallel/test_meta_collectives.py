"""Collectives on the meta device."""

import pytest
import torch

from drawloom.components.parallel.meta_collectives import count_message_bytes, emulate_collective


@pytest.mark.parametrize(
    ("kind", "shape", "parts"),
    [("all_gather", (8, 3), 0.75), ("reduce_scatter", (1, 3), 0.75), ("all_reduce", (2, 3), 1.5)],
)
def test_bytes_equal_those_of_rings(kind: str, shape: tuple[int, ...], parts: float) -> None:
    """Four ranks send three quarters of the larger tensor, and twice as much where all get the sum."""
    x = torch.empty(2, 3, device="meta")
    output = emulate_collective(x, shape, kind, "tensor", 4)  # type: ignore[arg-type]
    assert (output.shape, output.is_meta, output.dtype) == (shape, True, x.dtype)
    assert count_message_bytes(x, output, kind, 4) == parts * max(x.nbytes, output.nbytes)
