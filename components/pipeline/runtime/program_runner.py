"""Runner for a step's microbatches through this rank's stages, in program order (gradient accumulation)."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor
from torch.autograd import profiler

from drawloom import UserError
from drawloom.components.pipeline.runtime.stage_runner import list_floating_leaves, require_grad_in_place
from drawloom.ports import Action, MicrobatchInputs, Operation, PassFeature, PassKind, RunnableStage, Stages

if TYPE_CHECKING:
    from drawloom.components.pipeline.runtime.p2p import P2PBuffers

StageMicrobatch = tuple[int, int]
"""Numbers of a stage and a microbatch."""


@attrs.define(eq=False)
class ProgramRunner:
    """
    Runner for a rank's program in one step; it is dropped with all its tensors, also if the step fails.

    `stages` are this rank's stages by number. In `actions` an overlap's parts follow one another. An output is buffered
    until the next stage on this rank consumes it, or until it is sent; `p2p` is None without other ranks. The last
    stage's detached output is passed to `on_output`. An error in `before_action` ends the program.
    """

    stages: Mapping[int, RunnableStage]
    microbatches: Sequence[MicrobatchInputs]
    boundaries: Stages
    p2p: "P2PBuffers | None"
    actions: Sequence[Action]
    kind: PassKind = "inference"
    on_output: Callable[[int, Any], None] = lambda _microbatch, _output: None
    before_action: Callable[[], None] = lambda: None
    _outputs: dict[StageMicrobatch, Any] = attrs.field(factory=dict)
    _grads: dict[StageMicrobatch, list[Tensor]] = attrs.field(factory=dict)

    def run(self, features: Sequence[PassFeature] = ()) -> None:
        """Run all actions in order, with the features around them."""
        operations: Mapping[str, Operation] = {
            "F": self._run_forward,
            "B": self._run_backward,
            "I": self._run_backward,
            "W": lambda action: self.stages[action.stage].backward_weight(action.microbatch),
            "SEND_F": self._send_forward,
            "RECV_F": self._start_receive_forward,
            "SEND_B": self._send_backward,
            "RECV_B": self._start_receive_backward,
            "UNSHARD": lambda action: self.stages[action.stage].shards.start_unshard(),
            "RESHARD": lambda action: self.stages[action.stage].shards.reshard(),
            "REDUCE_SCATTER": lambda action: self.stages[action.stage].reduce_in_next_backward(is_last_in_step=False),
            "REDUCE_GRAD": lambda action: self.stages[action.stage].reduce_in_next_backward(is_last_in_step=True),
        }
        for feature in features:
            operations = feature.start_run(self, operations)
        for action in self.actions:
            self.before_action()
            # A traceback alone would not name the stage and microbatch among many identical ones.
            try:
                # A range costs microseconds, which matter in an action.
                with profiler.record_function(str(action)) if profiler._is_profiler_enabled else nullcontext():
                    operations[action.op](action)
            except UserError as error:
                raise UserError(f"{error} (at {action}: stage {action.stage})", error.exit_code) from error
            except Exception as error:
                error.add_note(f"in the pipeline at {action}: stage {action.stage}, microbatch {action.microbatch}")
                raise
        if self.p2p is not None:
            self.p2p.wait_for_sends()
        for feature in reversed(features):
            feature.end_run(self)

    @property
    def _messages(self) -> "P2PBuffers":
        if self.p2p is None:
            raise ValueError("a rank without links to other ranks can't exchange messages")
        return self.p2p

    def _run_forward(self, action: Action) -> None:
        stage, microbatch = self.stages[action.stage], self.microbatches[action.microbatch]
        inputs = microbatch.inputs if action.stage == 0 else self._wait_and_take_stage_input(action)
        output = stage.forward(action.microbatch, inputs, microbatch.shared, microbatch.batch, microbatch.finish)
        if stage.last:
            self.on_output(action.microbatch, output)
        else:
            self._outputs[action.stage + 1, action.microbatch] = output

    def _wait_and_take_stage_input(self, action: Action) -> Any:
        """Return the input of a later stage's pass: the previous stage's local output, or a message."""
        key = action.stage, action.microbatch
        inputs = (
            self._outputs.pop(key) if key in self._outputs else self._messages.wait_and_take_message(("RECV_F", *key))
        )
        # Detached tensors become leaves: every stage has its own graph, which its backward pass frees.
        return require_grad_in_place(inputs) if torch.is_grad_enabled() else inputs

    def _send_forward(self, action: Action) -> None:
        output = self._outputs.pop((action.stage + 1, action.microbatch))
        self._send_tree(action, output, self._infer_stage_input(action.stage + 1, action.microbatch))

    def _start_receive_forward(self, action: Action) -> None:
        like = self._infer_stage_input(action.stage, action.microbatch)
        self._messages.start_receive(("RECV_F", action.stage, action.microbatch), _get_peer_rank(action), like)

    def _infer_stage_input(self, stage: int, microbatch: int) -> Any:
        """Return a stage's input for a microbatch as meta tensors; sender and receiver both derive them."""
        inputs = self.microbatches[microbatch]
        return self.boundaries.infer_stage_inputs(stage, inputs.inputs, inputs.shared)

    def _send_tree(self, action: Action, payload: Any, expected: Any) -> None:
        """Send a tensor tree; UserError if the receiver expects other shapes or dtypes."""
        from drawloom.components.pipeline.runtime.p2p import describe_tree_mismatch, list_tensors

        # The receiver has allocated the expected tree, and neither NCCL nor gloo compares shapes and dtypes.
        if problem := describe_tree_mismatch(payload, expected):
            kind = "output" if action.op == "SEND_F" else "gradient"
            raise UserError(
                f"stage {action.stage} has another {kind} for microbatch {action.microbatch} than rank "
                f"{action.peer} of the pipeline expects: {problem}; a stage must return the shapes and dtypes that its "
                "module returns on the meta device, so check autocast, and shapes or dtypes that depend on values"
            )
        self._messages.send(_get_peer_rank(action), list_tensors(payload))

    def _run_backward(self, action: Action) -> None:
        """Run B or I, and buffer the input gradients for the previous stage, unless this is the first stage."""
        stage = self.stages[action.stage]
        run = stage.backward if action.op == "B" else stage.backward_input
        # The last stage's output is a loss, whose gradient is 1.
        grads = run(action.microbatch, None if stage.last else self._wait_and_take_output_grads(action))
        if action.stage > 0:
            self._grads[action.stage - 1, action.microbatch] = grads

    def _wait_and_take_output_grads(self, action: Action) -> list[Tensor]:
        """Return the gradients of an earlier stage's output, of any shapes, from the buffer or a message."""
        key = action.stage, action.microbatch
        if key in self._grads:
            return self._grads.pop(key)
        grads: list[Tensor] = self._messages.wait_and_take_message(("RECV_B", *key))
        return grads

    def _send_backward(self, action: Action) -> None:
        grads = self._grads.pop((action.stage - 1, action.microbatch))
        self._send_tree(action, grads, list_floating_leaves(self._infer_stage_input(action.stage, action.microbatch)))

    def _start_receive_backward(self, action: Action) -> None:
        like = list_floating_leaves(self._infer_stage_input(action.stage + 1, action.microbatch))
        self._messages.start_receive(("RECV_B", action.stage, action.microbatch), _get_peer_rank(action), like)


def _get_peer_rank(action: Action) -> int:
    if action.peer is None:
        raise ValueError(f"the message {action} has no peer rank; insert messages with `lower_to_rank_program`")
    return action.peer
