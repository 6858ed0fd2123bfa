"""
What a stage needs for a microbatch: seconds, and bytes that it holds for its backward pass.

The stage's own module runs on the meta device, forward and backward, as a run does it. Most of its blocks are alike:
one of each kind is recorded, with all others left out, and what it adds to a stage without blocks counts as often as
there are such blocks. So a plan takes as long for 100 layers as for 10.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.distributed.device_model import DeviceModel
from drawloom.components.parallel.context import ContextPart
from drawloom.components.pipeline.runtime.stage_runner import StageRunner, as_input, floating
from drawloom.components.planning.attention import Attended
from drawloom.components.planning.recorder import Links, PassCost, Recorder
from drawloom.components.ports.distributed import Group
from drawloom.components.ports.pipeline import Loss, Referenced
from drawloom.components.ports.stages import Recompute, Stage
from drawloom.components.stages.activation_specs import on_meta
from drawloom.components.state.batch import Batch
from drawloom.components.state.trees import leaves, transform
from drawloom.graph import UserError
from drawloom.kernels.deferred_grads import fused_on_meta
from drawloom.kernels.recompute_policy import make_recomputable

Passes = dict[str, PassCost]
"""By op: F, B or I and W."""


@attrs.frozen
class StageCosts:
    """
    Each pass of a stage for one microbatch, by op: F and B, and I and W if the backward pass can be in two parts.

    `held` of F is what is kept until the backward pass is done, that of I what is kept for W. `sent` is what goes to
    the next stage, in bytes. Rises are from what lives when the pass begins.
    """

    passes: Passes
    sent: int


Recordings = dict[Hashable, Any]
"""What was recorded of a recipe's model and loss, by what it depends on: plans of one recipe share it."""


@attrs.define(eq=False)
class StageMeter:
    """
    Measures stages of one model, for microbatches of (rows, length) of which this rank has a `context` part.

    What is recorded depends on stages, on `rows`, and on `known_by`, such as the links that collectives of a stage use.
    """

    loss: Loss
    batch_type: type[Batch]
    blocks: Callable[[nn.Module], Sequence[nn.Module]]
    rows: int
    length: int
    context: Group
    gradient: torch.dtype
    device: DeviceModel
    links: Links
    attended: Attended
    known_by: Hashable = ()
    recordings: Recordings = attrs.field(factory=dict)
    _inputs: tuple[Any, Any, Batch] | None = None
    _hidden: Any = None

    def costs(self, stage: Stage, split: bool) -> StageCosts:
        """Those of a stage; the first stage must come first, since it tells what others are given."""
        blocks = [
            _Block(_kind(each), _again(stage.recompute, n), n) for n, each in enumerate(self.blocks(stage.module))
        ]
        # The last one: when an earlier one is recomputed, what it has kept is free.
        earlier, last = blocks[:-1], blocks[-1:]
        alone = self._recorded(stage, last, split)
        passes, recorded = dict(alone), [alone]
        for each, count in Counter(earlier).items():
            example = next(block for block in earlier if block == each)
            # What blocks share, such as masks, the last one has kept, so that another adds what is its own.
            both = self._recorded(stage, [example, *last], split)
            passes = {op: part.plus(both[op].plus(alone[op], -1), count) for op, part in passes.items()}
            recorded.append(both)
        for op, part in passes.items():
            # What lives at a pass's peak but not behind it is that of one block; the rest may have grown with blocks.
            beyond = max(each[op].rise - each[op].grown for each in recorded)
            passes[op] = attrs.evolve(part, rise=max(part.rise, part.grown + beyond))
        return StageCosts(passes, sum(each.nbytes for each in leaves(self._hidden) if isinstance(each, Tensor)))

    def _recorded(self, stage: Stage, blocks: Sequence["_Block"], split: bool) -> Passes:
        """What a stage with no others but these blocks needs; recorded once for all stages that are alike."""
        around = _around(stage.module, self.blocks(stage.module))
        what = stage.span.embedding, stage.span.head, stage.recompute == "selective"
        passes: Passes = {}
        for in_parts in (False, True) if split else (False,):
            key = (self.rows, self.known_by, *what, around, tuple(blocks), in_parts)
            if key not in self.recordings:
                with _only(self.blocks(stage.module), blocks):
                    policy: Recompute = "selective" if stage.recompute == "selective" else "blocks"
                    found = self._passes(attrs.evolve(stage, recompute=policy), in_parts)
                self.recordings[key] = found, self._hidden
            more, self._hidden = self.recordings[key]
            passes |= more
        return passes

    def _passes(self, stage: Stage, split: bool) -> Passes:
        """Forward and backward of one microbatch, recorded; `split`, I and W alone."""
        given, shared, batch = self._batch()
        runner = StageRunner(stage, self.loss, split=split)
        recorder, found = Recorder(self.device, self.links, self.attended), {}
        for parameter in stage.module.parameters():
            if parameter.requires_grad:
                # There since an earlier microbatch, and so no part of what a pass makes.
                parameter.grad = torch.empty_like(parameter, dtype=self.gradient)
        fused = fused_on_meta() if self.device.is_gpu else nullcontext()
        with ExitStack() as hooks, fused, recorder:
            for handle in self._labels(recorder, stage):
                hooks.callback(handle.remove)
            with recorder.label("hidden states"):
                inputs = given if stage.index == 0 else as_input(transform(_new, self._hidden))
            recorder.begin()
            with recorder.label("head and loss" if stage.span.head else "hidden states"):
                outputs = runner.forward(0, inputs, shared, batch)
            if stage.index == 0 and not runner.last:
                self._hidden = on_meta(outputs)
            shapes = [on_meta(leaf) for leaf in floating(outputs)]
            del inputs, outputs
            found["F"] = recorder.end()
            for op, run in self._backwards(runner, split):
                recorder.begin()
                with recorder.label("pending weight gradients"):
                    run(None if runner.last else shapes) if op != "W" else run()
                found[op] = recorder.end()
        return found

    def _backwards(self, runner: StageRunner, split: bool) -> list[tuple[str, Callable[..., Any]]]:
        if not split:
            return [("B", partial(_with_new, runner.backward))]
        return [("I", partial(_with_new, runner.backward_input)), ("W", partial(runner.backward_weight, 0))]

    def _labels(self, recorder: Recorder, stage: Stage) -> Iterator[Any]:
        inside: set[nn.Module] = set()
        for block in self.blocks(stage.module):
            for name, child in block.named_children():
                yield from recorder.labelled(child, name)
            inside |= set(block.modules())
        for name, part in stage.module.named_modules():
            if part not in inside and not [*part.children()]:
                yield from recorder.labelled(part, name.rpartition(".")[2])

    def _batch(self) -> tuple[Any, Any, Batch]:
        """The inputs of a microbatch on the meta device, and its batch."""
        if self._inputs is None:
            try:
                batch = self.batch_type.outline(self.rows, self.length)
            except NotImplementedError as error:
                raise UserError(f"a plan needs the shapes of batches, and {error}", 2) from error
            if isinstance(self.loss, Referenced):
                batch = self.loss.with_reference(batch, batch.weights)
            part: Any = None
            if self.context.size > 1:
                part = on_meta(ContextPart.of(self.length, self.context))
                batch = part.cut(batch)
            inputs, shared = self.loss.inputs(batch)
            self._inputs = inputs, attrs.evolve(shared, part=part), batch
        return self._inputs


def _with_new(backward: Callable[..., Any], shapes: Sequence[Tensor] | None) -> None:
    """A backward pass with gradients of its outputs that have just arrived."""
    backward(0, None if shapes is None else [torch.empty_like(each) for each in shapes])


def _new(leaf: Any) -> Any:
    return torch.empty_like(leaf) if isinstance(leaf, Tensor) else leaf


@attrs.frozen
class _Block:
    """A block of a stage by its number; blocks that need the same are equal."""

    kind: Hashable
    again: bool
    number: int = attrs.field(eq=False)


def _kind(block: nn.Module) -> Hashable:
    """What blocks that need the same have in common."""
    parameters = [(name, each.shape, each.dtype, each.requires_grad) for name, each in block.named_parameters()]
    return type(block), tuple(parameters)


def _around(module: nn.Module, blocks: Sequence[nn.Module]) -> Hashable:
    """The parameters of a stage besides those of its blocks."""
    inside = {id(each) for block in blocks for each in block.parameters()}
    rest = [(name, each) for name, each in module.named_parameters() if id(each) not in inside]
    return tuple((name, each.shape, each.dtype, each.requires_grad) for name, each in rest)


def _again(policy: Recompute, number: int) -> bool:
    """Whether a block of a stage is computed again."""
    return policy == "blocks" or (isinstance(policy, int) and number % policy == 0)


@contextmanager
def _only(blocks: Sequence[nn.Module], some: Sequence[_Block]) -> Iterator[None]:
    """A context in which all blocks but some give what they get, and those of these are recomputed that are to be."""
    kept = {each.number: each for each in some}
    for number, block in enumerate(blocks):
        if number not in kept:
            block.forward = lambda hidden, *_, **__: hidden
        elif kept[number].again:
            make_recomputable([block])
    try:
        yield
    finally:
        for block in blocks:
            block.__dict__.pop("forward", None)
