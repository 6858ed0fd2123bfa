"""
Matrix products on GPUs without split-K.

Split-K divides a product's inner dimension among programs, into more parts if there are fewer rows, so that a row's
bits depend on the number of rows. cuBLAS needs a workspace for the parts. With the least one, rows in 16 bits have the
same bits from 16 rows on (measured on H100 and H200 with torch 2.11).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
"""Environment variables for workspaces in KiB; torch reads them at the first product on a device."""


@contextmanager
def forbid_split_k() -> Iterator[None]:
    """Give cuBLAS no workspace for split-K; a process with earlier products, such as a notebook, keeps its own."""
    before = {name: os.environ.get(name) for name in WORKSPACES}
    os.environ.update(WORKSPACES)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
