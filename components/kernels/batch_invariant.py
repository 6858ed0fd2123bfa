"""Kernels whose results for a token have the same bits in every batch, at every length, and with a cache."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from drawloom import UserError, component, internal
from drawloom.components.kernels.auto import AutoKernels
from drawloom.components.kernels.choosing import ImplementationChoice, choose_implementation, load_implementation
from drawloom.kernels.attention.eager import AttentionImplementation
from drawloom.kernels.batch_invariant.eager import (
    BLOCKS,
    apply_with_padded_rows,
    attend_in_blocks,
    cut_cross_entropy_with_padded_rows,
    multiply_groups_with_padded_rows,
)
from drawloom.kernels.linear import linear_eager
from drawloom.ports import KeyValueCache, RowPart, StorageFormat

OWN = {"attention": "blocks", "grouped_gemm": "fixed tiles", "linear_cross_entropy": "fixed tiles"}
"""Names of the implementations that only these kernels have, by operation."""


REDUCTIONS = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
"""torch's settings for sums of products in 16 bits: whether they are in 16 bits, and whether split-K is allowed."""


@contextmanager
def forbid_split_k() -> Iterator[None]:
    """
    Let cuBLASLt compute products, without split-K in 16 bits; restore torch's settings at the end.

    Split-K divides a product's inner dimension among programs, into more parts if there are fewer rows, so that a row's
    bits depend on the number of rows. Without it rows in 16 bits have the same bits from 16 rows on, for any number of
    outputs (measured on an H200 with torch 2.11; `tests/gpu/test_batch_invariant.py`).
    """
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


@component
class BatchInvariantKernels(AutoKernels):
    """
    Model operations in which a token has the same bits in every batch, at every length and with a cache.

    Without recurrent layers, and on a GPU in 16 bits only. Other operations are those of `kernels.auto`, because they
    compute row by row anyway.
    """

    batch_invariant: ClassVar[bool] = True
    # operations with one implementation are no settings
    _attention: str = internal("auto")
    _grouped_gemm: str = internal("auto")
    _linear_cross_entropy: str = internal("auto")
    filter_eps: float = internal(0.0)
    _settings_before: ExitStack = internal(factory=ExitStack)

    def open(self) -> None:
        """Load the implementations, and let cuBLAS compute without split-K. Raises UserError like `kernels.auto`."""
        if self.device.device.type == "cuda":
            self._settings_before.enter_context(forbid_split_k())
        super().open()

    def close(self) -> None:
        """Restore torch's settings for products."""
        self._settings_before.close()

    def choose_implementation_of(self, operation: str) -> ImplementationChoice:
        if operation in OWN:
            return ImplementationChoice(OWN[operation], "kernels are batch-invariant")
        return super().choose_implementation_of(operation)

    def _load_function(self, operation: str) -> Any:
        if operation == "attend_to_cached":
            return attend_in_blocks
        if operation not in OWN:
            return super()._load_function(operation)
        if self._batch_invariant_attention is None:
            return {
                "attention": BLOCKS,
                "grouped_gemm": multiply_groups_with_padded_rows,
                "linear_cross_entropy": cut_cross_entropy_with_padded_rows,
            }[operation]
        if operation == "attention":
            return self._block_attention_with_gradients
        # The kernels for losses and experts have tiles of one size.
        if operation == "grouped_gemm":
            return import_module("drawloom.kernels.grouped_gemm.triton").multiply_groups_in_fixed_tiles
        return load_implementation("linear_cross_entropy", "cut")

    @property
    def _block_attention_with_gradients(self) -> AttentionImplementation:
        """Return batch-invariant attention in Triton, with the gradients of the implementation for the GPU."""
        name = choose_implementation("attention", "auto", self.device.device).name
        return self._batch_invariant_attention.create_block_attention(load_implementation("attention", name))  # type: ignore[no-any-return]

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        _refuse_wide_products(x)
        return apply_with_padded_rows(lambda rows: linear_eager(rows, weight, bias), x)

    def linear_quantized(
        self, x: Tensor, stored: Tensor, weight_format: StorageFormat, bias: Tensor | None = None
    ) -> Tensor:
        _refuse_wide_products(x)
        multiply = super().linear_quantized
        return apply_with_padded_rows(lambda rows: multiply(rows, stored, weight_format, bias), x)

    def attention_mask(
        self,
        documents: Tensor,
        window: int | None = None,
        part: RowPart | None = None,
        cache: KeyValueCache | None = None,
        one_document_per_row: bool = False,
    ) -> Any:
        """Return the mask for `attention`. Raises UserError for a part of a row on a GPU."""
        if part is not None and self._batch_invariant_attention is not None:
            raise UserError("kernels.batch_invariant has no attention to a part of a row; write context = 1", 2)
        return super().attention_mask(documents, window, part, cache, one_document_per_row)


def _refuse_wide_products(x: Tensor) -> None:
    """Raise UserError for products of x that are not batch-invariant on its device."""
    if x.is_cuda and x.dtype.itemsize > 2:
        raise UserError(
            "kernels.batch_invariant: a row of cuBLAS's products in float32 depends on the number of rows; write "
            'precision.compute = "bfloat16", or use = "kernels.auto"',
            2,
        )
