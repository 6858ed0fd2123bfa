"""Products without split-K."""

import pytest
import torch

from drawloom.components.kernels.batch_invariant import REDUCTIONS, forbid_split_k


def read_split_k_settings() -> list[bool]:
    return [getattr(torch.backends.cuda.matmul, f"{name}_split_k") for name in REDUCTIONS]


def test_settings_are_restored() -> None:
    """Within the context no product in 16 bits uses split-K; after an error in it torch's settings are as before."""
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False, False
    try:
        with pytest.raises(ZeroDivisionError), forbid_split_k():
            assert read_split_k_settings() == [False, False]
            raise ZeroDivisionError
        assert read_split_k_settings() == [False, True]
        assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    finally:
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True
