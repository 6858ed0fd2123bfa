"""CUDA graphs for functions: their kernels are recorded once and launched together."""

from collections.abc import Callable
from typing import Any, Protocol

import attrs
import torch


class Recorded(Protocol):
    """Function whose kernels are recorded, to be launched again by `replay`."""

    @property
    def outputs(self) -> Any:
        """Return the function's outputs, whose addresses are the same in every replay."""
        ...

    def replay(self) -> None:
        """Compute the outputs from the inputs' current values."""
        ...


Record = Callable[[Callable[[], Any]], Recorded]
"""Record a function without running its kernels; recordings of one `Record` share memory, and must take turns."""


@attrs.frozen
class CudaGraph:
    """Recorded CUDA graph."""

    graph: torch.cuda.CUDAGraph
    outputs: Any

    def replay(self) -> None:
        """Launch the graph in the current stream."""
        self.graph.replay()


@attrs.define
class CudaRecord:
    """CUDA graph recorder with its own stream and memory pool."""

    stream: torch.cuda.Stream
    _pool: Any = attrs.field(init=False, factory=torch.cuda.graph_pool_handle)

    def __call__(self, run: Callable[[], Any]) -> CudaGraph:
        """Record a function's kernels as a graph."""
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        # `torch.cuda.graph` would wait for the device, which may be receiving a message that another rank only sends
        # after a message of this rank.
        with torch.cuda.stream(self.stream):
            # Other threads, such as checkpoint writers, may meanwhile call what this thread must not.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = run()
            finally:
                graph.capture_end()
        return CudaGraph(graph, outputs)
