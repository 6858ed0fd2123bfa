"""Functions whose kernels are recorded once, and launched together as a CUDA graph."""

from collections.abc import Callable
from typing import Any, Protocol

import attrs
import torch


class Recorded(Protocol):
    """A recorded function."""

    @property
    def outputs(self) -> Any:
        """What the function gives, at the same addresses after each replay."""
        ...

    def replay(self) -> None:
        """Compute the outputs anew, from what is in the inputs now."""
        ...


Record = Callable[[Callable[[], Any]], Recorded]
"""Records a function without running its kernels; what is recorded by one `Record` shares memory, and takes turns."""


@attrs.frozen
class CudaGraph:
    """A recorded CUDA graph."""

    graph: torch.cuda.CUDAGraph
    outputs: Any

    def replay(self) -> None:
        """Launch it in the current stream."""
        self.graph.replay()


@attrs.define
class CudaRecord:
    """Records in a stream of its own, with a memory pool of its own."""

    stream: torch.cuda.Stream
    _pool: Any = attrs.field(init=False, factory=torch.cuda.graph_pool_handle)

    def __call__(self, run: Callable[[], Any]) -> CudaGraph:
        """The graph of what a function launches."""
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        # Not `torch.cuda.graph`, which waits for the device: that may be receiving what another rank sends only when it
        # has got something from this one.
        with torch.cuda.stream(self.stream):
            # Other threads, such as those that write checkpoints, may do meanwhile what this one must not.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = run()
            finally:
                graph.capture_end()
        return CudaGraph(graph, outputs)
