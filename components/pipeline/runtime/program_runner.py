"""One pass of a step's microbatches through this rank's stages, as its line says."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from drawloom.components.pipeline.runtime.p2p import P2PBuffers, mismatch
from drawloom.components.pipeline.runtime.stage_runner import StageRunner, as_input, floating
from drawloom.components.pipeline.state.handler import PipelineStateHandler
from drawloom.components.ports.data import Batch
from drawloom.components.ports.model import BatchContext, StageInputs
from drawloom.components.ports.pipeline import Losses
from drawloom.components.ports.program import Action, RankProgram, flat
from drawloom.components.storage.pytree import leaves
from drawloom.graph import UserError

Place = tuple[int, int]
"""A stage and a microbatch."""


@attrs.frozen
class MicrobatchInputs:
    """A microbatch as the stages see it."""

    tokens: Tensor
    shared: BatchContext
    batch: Batch | None = None


@attrs.define(eq=False)
class ProgramRunner:
    """
    Carries a line out. It is made for one pass and dropped with all that lives in it, also when the pass fails.

    `works` are this rank's stages by their numbers. What one stage makes for another waits here until it is taken by
    the other, if that stands on this rank too, or is sent. What the last stage makes is handed to `each_output`.
    """

    works: Mapping[int, StageRunner]
    microbatches: Sequence[MicrobatchInputs]
    boundaries: StageInputs
    mail: P2PBuffers
    state: PipelineStateHandler
    each_output: Callable[[int, Any], None] = lambda _microbatch, _output: None
    _forward: dict[Place, Any] = attrs.field(factory=dict)
    _backward: dict[Place, list[Tensor]] = attrs.field(factory=dict)

    def run(self, line: RankProgram) -> None:
        """Do everything in the line, in order; parts of an overlap one after another, each sending when it can."""
        verbs: dict[str, Callable[[Action], None]] = {
            "F": self._run_forward,
            "B": self._run_backward,
            "I": self._run_backward_input,
            "W": self._run_backward_weight,
            "SEND_F": self._send_forward,
            "RECV_F": self._receive_forward,
            "SEND_B": self._send_backward,
            "RECV_B": self._receive_backward,
        }
        for action in flat(line):
            try:
                verbs[action.op](action)
            except UserError as error:
                raise UserError(f"{error} (at {action}: stage {action.stage})", error.exit_code) from error
            except Exception as error:
                error.add_note(f"in the pipeline at {action}: stage {action.stage}, microbatch {action.microbatch}")
                raise
        self.mail.finish()

    def losses(self, device: torch.device) -> Losses:
        """The sums over microbatches, 0-dimensional; zeros, and no named ones, on a rank without the last stage."""
        whole = self.state.global_state()
        if "loss" not in whole:
            return Losses(*torch.zeros(2, dtype=torch.float64, device=device))
        sums = {name: each.double().sum() for name, each in whole["sums"].items()}
        return Losses(whole["loss"].double().sum(), whole["weight"].double().sum(), sums, whole)

    def _run_forward(self, action: Action) -> None:
        work, load = self.works[action.stage], self.microbatches[action.microbatch]
        output = work.forward(action.microbatch, self._stage_input(action, load), load.shared, load.batch)
        if work.last:
            self.each_output(action.microbatch, output)
        else:
            self._forward[action.stage + 1, action.microbatch] = output

    def _stage_input(self, action: Action, load: MicrobatchInputs) -> Any:
        if action.stage == 0:
            return load.tokens
        place = action.stage, action.microbatch
        given = self._forward.pop(place) if place in self._forward else self.mail.wait_recv(("RECV_F", *place))
        return as_input(given) if torch.is_grad_enabled() else given

    def _send_forward(self, action: Action) -> None:
        output = self._forward.pop((action.stage + 1, action.microbatch))
        self._send(action, output, self._activations(action.stage + 1, action.microbatch))

    def _receive_forward(self, action: Action) -> None:
        like = self._activations(action.stage, action.microbatch)
        self.mail.receive(("RECV_F", action.stage, action.microbatch), _peer(action), like)

    def _activations(self, stage: int, microbatch: int) -> Any:
        """The tree of meta tensors that a stage takes for a microbatch: what both ends of a message agree on."""
        load = self.microbatches[microbatch]
        return self.boundaries.boundary(stage, load.tokens, load.shared)

    def _send(self, action: Action, payload: Any, expected: Any) -> None:
        """Send a tree of tensors; a UserError where the receiver would read its bytes as something else."""
        if problem := mismatch(payload, expected):
            kind = "output" if action.op == "SEND_F" else "gradient"
            raise UserError(
                f"stage {action.stage} has another {kind} for microbatch {action.microbatch} than rank "
                f"{action.peer} of the pipeline expects: {problem}; a stage gives what its module gives on the meta "
                "device, so check autocast, and shapes or dtypes that depend on values"
            )
        self.mail.send(_peer(action), [leaf for leaf in leaves(payload) if isinstance(leaf, Tensor)])

    def _run_backward(self, action: Action) -> None:
        self._store_grads(action, self.works[action.stage].backward(action.microbatch, self._grads(action)))

    def _run_backward_input(self, action: Action) -> None:
        self._store_grads(action, self.works[action.stage].backward_input(action.microbatch, self._grads(action)))

    def _run_backward_weight(self, action: Action) -> None:
        self.works[action.stage].backward_weight(action.microbatch)

    def _grads(self, action: Action) -> list[Tensor] | None:
        """The gradients of what a stage gave; None of a loss."""
        place = action.stage, action.microbatch
        if self.works[action.stage].last:
            return None
        if place in self._backward:
            return self._backward.pop(place)
        found: list[Tensor] = self.mail.wait_recv(("RECV_B", *place))
        return found

    def _store_grads(self, action: Action, grads: list[Tensor]) -> None:
        if action.stage > 0:
            self._backward[action.stage - 1, action.microbatch] = grads

    def _send_backward(self, action: Action) -> None:
        grads = self._backward.pop((action.stage - 1, action.microbatch))
        self._send(action, grads, floating(leaves(self._activations(action.stage, action.microbatch))))

    def _receive_backward(self, action: Action) -> None:
        like = floating(leaves(self._activations(action.stage + 1, action.microbatch)))
        self.mail.receive(("RECV_B", action.stage, action.microbatch), _peer(action), like)


def _peer(action: Action) -> int:
    if action.peer is None:
        raise ValueError(f"{action} goes to nobody")
    return action.peer
