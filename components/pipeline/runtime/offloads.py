"""Activations that wait in host memory between a microbatch's forward and backward pass."""

from collections.abc import Mapping, Sequence, Set
from functools import partial
from weakref import ref

import attrs

from drawloom.components.distributed.offloads import OffloadedTensors, Offloads
from drawloom.kernels.recompute.saved_tensors import Collecting, KeptTensor
from drawloom.ports import OPS, Action, Operation, PassFeature, PassRun, is_dtensor


@attrs.define(eq=False)
class ActivationMoves:
    """Activations leaving the device between one run's passes, for the stages in `offloaded`."""

    run: PassRun
    offloads: Offloads
    offloaded: Set[int]
    _kept: dict[tuple[int, int], Sequence[ref[KeptTensor]]] = attrs.field(init=False, factory=dict)
    _moved: dict[tuple[int, int], OffloadedTensors] = attrs.field(init=False, factory=dict)
    # activations on their way, with the number of compute actions before their memory is freed
    _leaving: list[tuple[int, OffloadedTensors]] = attrs.field(init=False, factory=list)

    def compute(self, operation: Operation, action: Action) -> None:
        """Run a compute action; first free the memory for activations whose offload began before the last one."""
        waiting = [(actions - 1, tensors) for actions, tensors in self._leaving]
        for actions, tensors in waiting:
            if actions == 0:
                tensors.free_device_memory()
        self._leaving = [(actions, tensors) for actions, tensors in waiting if actions]
        key = action.stage, action.microbatch
        if action.op == "F" and action.stage in self.offloaded:
            with Collecting() as collecting:
                operation(action)
            self._kept[key] = collecting.kept
            return
        if (moved := self._moved.pop(key, None)) is not None:
            moved.wait_for_reload()
        operation(action)

    def offload(self, action: Action) -> None:
        """Start to copy a microbatch's activations to host memory."""
        key, runnable = (action.stage, action.microbatch), self.run.stages[action.stage]
        # The memory of inputs, outputs and parameters stays, whoever saved it.
        parameters = (parameter for parameter in runnable.stage.module.parameters() if not is_dtensor(parameter))
        others = (*runnable.list_inputs_and_outputs(action.microbatch), *parameters)
        self._moved[key] = self.offloads.start_offload(self._kept.pop(key), others)
        self._leaving.append((2, self._moved[key]))

    def reload(self, action: Action) -> None:
        """Start to copy a microbatch's activations back."""
        self._moved[action.stage, action.microbatch].reload()


@attrs.frozen(eq=False)
class Offloading(PassFeature):
    """Feature for programs with actions OFFLOAD and RELOAD, for the stages in `offloaded`."""

    offloads: Offloads
    offloaded: Set[int]

    def start_run(self, run: PassRun, operations: Mapping[str, Operation]) -> Mapping[str, Operation]:
        """Return operations with moves of activations."""
        moves = ActivationMoves(run, self.offloads, self.offloaded)
        computing: dict[str, Operation] = {op: partial(moves.compute, operations[op]) for op in OPS}
        return {**operations, **computing, "OFFLOAD": moves.offload, "RELOAD": moves.reload}
