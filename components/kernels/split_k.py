"""
Matrix products on GPUs without split-K.

Split-K divides a product's inner dimension among programs, into more parts if there are fewer rows, so that a row's
bits depend on the number of rows. cuBLASLt can be told not to use it: rows in 16 bits then have the same bits from 16
rows on, for any number of outputs (measured on an H200 with torch 2.11; `tests/gpu/test_batch_invariant.py`).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

REDUCTIONS = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
"""torch's settings for sums of products in 16 bits: whether they are in 16 bits, and whether split-K is allowed."""


@contextmanager
def forbid_split_k() -> Iterator[None]:
    """Let cuBLASLt compute products, without split-K in 16 bits; restore torch's settings at the end."""
    matmul = torch.backends.cuda.matmul
    before = {name: (getattr(matmul, name), getattr(matmul, f"{name}_split_k")) for name in REDUCTIONS}
    library = torch.backends.cuda.preferred_blas_library()
    try:
        if torch.version.cuda is not None:  # torch for CPUs refuses the choice
            torch.backends.cuda.preferred_blas_library("cublaslt")
        for name in REDUCTIONS:
            setattr(matmul, name, (False, False))
        yield
    finally:
        for name, allowed in before.items():
            setattr(matmul, name, allowed)
        torch.backends.cuda.preferred_blas_library(library)
