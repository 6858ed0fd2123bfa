"""CUDA graphs for the passes of a rank's stages: see `runtime/capture.py`."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, ClassVar

import attrs
import torch

from drawloom import NodeView, Problem, UserError, component, internal
from drawloom.components.parallel.dimensions import DIMENSIONS
from drawloom.components.pipeline.runtime.capture import (
    CapturedRunner,
    GradientSums,
    StageGraphs,
    count_peak_microbatches_in_flight,
    describe_capture_error,
)
from drawloom.components.pipeline.runtime.cuda_graphs import CudaRecord, Record
from drawloom.ports import (
    Action,
    Device,
    Microbatches,
    Operation,
    PassFeature,
    PassRun,
    RunnableStage,
    StageFeature,
    StageNodes,
    WrappingOrder,
)


@component(impact="safe")
class CapturedPasses(StageFeature, PassFeature):
    """
    CUDA graphs for all passes on a GPU: faster for small microbatches and for texts.

    From the second step on, a stage's pass is one launch. Passes over one new token per row are, too.
    """

    order: ClassVar[WrappingOrder] = WrappingOrder.LAUNCH
    excludes: ClassVar[Mapping[str, str]] = {
        "listeners.replay": "it can't observe the layers in CUDA graphs",
        "pipeline.offloaded": "passes in CUDA graphs keep their activations in place",
        "pipeline.streams": "CUDA graphs for passes share memory, so two passes can't run at the same time",
    }
    keeps_layer_shapes: ClassVar[bool] = True
    runs_gradient_hooks: ClassVar[bool] = False

    device: Device
    _graphs: dict[int, StageGraphs] = internal(factory=dict)
    _sums: GradientSums = internal(factory=GradientSums)
    _has_one_document_per_row: bool = internal(True)

    @classmethod
    def check_stages(cls, feature: NodeView, nodes: StageNodes) -> Iterator[Problem]:
        """Yield problems if passes contain collectives, adapters use dropout, or activations leave the device."""
        sizes = nodes.sizes.settings()
        uncapturable = (dimension.name for dimension in DIMENSIONS if not dimension.can_capture)
        if name := next((name for name in uncapturable if sizes[name] > 1), None):
            text = f"passes with collectives of ranks along {name!r} can't be captured as CUDA graphs"
            yield feature.problem("use", text, f"remove [{feature.name}], or write {name} = 1 in [{nodes.mesh.name}]")
        for adapter in nodes.stages.neighbours("adapters"):
            if adapter.settings.get("dropout"):
                draws = f"[{adapter.name}] draws new random numbers for dropout in each pass"
                hint = f"remove [{feature.name}], or write dropout = 0.0 in [{adapter.name}]"
                yield feature.problem("use", f"{draws}, but a CUDA graph repeats its own", hint)
        for schedule in nodes.stages.neighbours("schedule"):
            if schedule.settings.get("offload"):
                text = cls.excludes["pipeline.offloaded"]
                yield schedule.problem("offload", text, f"remove it, or [{feature.name}]")

    @cached_property
    def _new_record(self) -> Callable[[], Record] | None:
        """Factory for recorders on a GPU; None on a CPU, whose kernels take longer than their launches."""
        if self.device.device.type == "cpu":
            return None
        stream: Any = torch.cuda.Stream(self.device.device)  # type: ignore[no-untyped-call]
        return lambda: CudaRecord(stream)

    def start_run(self, run: PassRun, operations: Mapping[str, Operation]) -> Mapping[str, Operation]:
        """Record missing graphs before a training step, and let all stages launch their graphs."""
        if (new_record := self._new_record) is None:
            return operations
        if run.kind == "training":
            run.microbatches = self._unify_one_document_flags(run.microbatches)
            self._record_missing_graphs(run.actions)
        run.stages = {index: self._wrap(runnable, new_record) for index, runnable in run.stages.items()}
        return operations

    def end_run(self, run: PassRun) -> None:
        """Keep the training step's gradient tensors for later steps."""
        if self._new_record is not None and run.kind == "training":
            for graphs in self._graphs.values():
                self._sums.adopt_gradients(graphs.stage.module.parameters())

    def _wrap(self, runnable: RunnableStage, new_record: Callable[[], Record]) -> CapturedRunner:
        """Return a stage's runner for one step."""
        stage, objective = runnable.stage, runnable.objective
        graphs = self._graphs.setdefault(stage.index, StageGraphs(stage, objective, new_record))
        return CapturedRunner(stage, objective, runnable.state, runnable.split, graphs=graphs)

    def _unify_one_document_flags(self, microbatches: Microbatches) -> Microbatches:
        """
        Return a step's microbatches with one `one_document_per_row` flag: true until a row with several documents
        occurs.

        Rows with several documents are the general case. When they first occur, graphs are recorded again, and then
        serve all later microbatches, because a microbatch of packed data sometimes has only whole rows.
        """
        if self._has_one_document_per_row:
            if all(inputs.shared.one_document_per_row for inputs in microbatches):
                return microbatches
            self._has_one_document_per_row = False
            self._graphs.clear()
        return [
            attrs.evolve(inputs, shared=attrs.evolve(inputs.shared, one_document_per_row=False))
            for inputs in microbatches
        ]

    def _record_missing_graphs(self, actions: Iterable[Action]) -> None:
        """
        Record missing graphs before a step's first microbatch; UserError if a pass can't be recorded.

        No messages are in flight then: recording may wait for all GPU work, including a message from a rank that waits
        for this rank's message.
        """
        most = count_peak_microbatches_in_flight(actions)
        if any(graphs.lacks_slots(most[index]) for index, graphs in self._graphs.items()):
            torch.cuda.empty_cache()  # the pools of slots cannot use memory that steps have freed
        self._sums.attach_to_parameters()
        for index, graphs in self._graphs.items():
            try:
                graphs.release_slots_and_record_missing(most[index])
            except RuntimeError as error:
                raise UserError(describe_capture_error(index, error), exit_code=2) from error
        self._sums.restore_or_zero_sums()
