"""
A stage's costs for a microbatch: seconds, and the bytes kept for its backward pass.

The stage's module runs forward and backward on the meta device, exactly as in a run. Most blocks are equal: one block
per kind is recorded with all other blocks left out, and its costs are multiplied by the number of equal blocks. A plan
therefore takes as long for 100 layers as for 10.

A recorder counts live bytes, and the operations' estimated seconds. A meta tensor has a storage without memory, with
the lifetime of a real one. So the live storages' sum is the memory an allocator would have handed out. An operation
takes as long as its arithmetic or its memory traffic, whichever is more (Williams et al. 2009, "Roofline", CACM 52(4)),
and a launch. Attention takes both, one after the other, because kernels before and after its products sum and round.
FLOPs and scratch memory are registered with the operations (`kernels/operation.py`).
"""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from drawloom import UserError, internal
from drawloom.components.distributed.device_model import DeviceModel, Link
from drawloom.components.parallel.context_part import ContextPart
from drawloom.components.parallel.meta_collectives import COLLECTIVE, count_message_bytes
from drawloom.components.pipeline.runtime.p2p import list_tensors
from drawloom.components.pipeline.runtime.stage_runner import StageRunner, list_floating_leaves, require_grad_in_place
from drawloom.components.planning.attention import AttentionFractions
from drawloom.components.stages.activation_specs import copy_tree_to_meta
from drawloom.components.state.trees import list_leaves, map_leaves
from drawloom.kernels.deferred_grads import fuse_gradient_sums_on_meta
from drawloom.kernels.host_copies import COPY
from drawloom.kernels.operation import OperationCosts, accesses_elements, bind_arguments, compute_operation_costs
from drawloom.ports import Batch, FrozenModel, Group, HasCostKey, Loss, Recompute, Referenced, Stage


@attrs.frozen
class Work:
    """
    Seconds for operations.

    `flops`, `memory` and `links` are their FLOPs, bytes and messages at the device's data sheet rates; `floor` adds the
    longest by operation. `planned` is at the rates that a step reaches.
    """

    flops: float = 0.0
    memory: float = 0.0
    links: float = 0.0
    floor: float = 0.0
    planned: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(**{name: seconds + getattr(other, name) for name, seconds in attrs.asdict(self).items()})

    def __mul__(self, times: float) -> "Work":
        return Work(**{name: times * seconds for name, seconds in attrs.asdict(self).items()})


OPERATIONS = PRODUCTS, ATTENTION, ELEMENTWISE = "products", "attention", "norms and elementwise"
"""Kinds; a collective has its mesh dimension as kind."""

COUNTS = "the host, which waits for counts"
"""Reason to wait: the host can't issue operations ahead, because it counts experts' rows."""


Amount = TypeVar("Amount", int, Work)


def add_by_label(
    first: Mapping[str, Amount], second: Mapping[str, Amount], times: int, zero: Amount
) -> dict[str, Amount]:
    """Return first + times * second by label; a missing label counts as `zero`."""
    return {**first, **{label: first.get(label, zero) + amount * times for label, amount in second.items()}}


@attrs.define
class PassCost:
    """
    Costs of one pass.

    `seconds` is the time on the device, including `comm_seconds`, waits for collectives. `host` is the host's time to
    issue the pass; `link_seconds` is the time for copies on the link to host memory; `flops` counts matrix
    products. `peak_delta` is the peak of the live bytes, and `net_delta` their number at the end, which is negative if
    the pass frees more than it allocates; `last_delta` is B's peak in its last block, the stage's first one, without
    that block's gradients. All three are relative to the start.
    `kept_bytes` are the bytes alive at the end, by label, and `work` divides `seconds` by kind of operation.
    """

    seconds: float = 0.0
    comm_seconds: float = 0.0
    host: float = 0.0
    flops: float = 0.0
    peak_delta: int = 0
    net_delta: int = 0
    kept_bytes: Mapping[str, int] = attrs.field(factory=dict)
    link_seconds: float = 0.0
    work: Mapping[str, Work] = attrs.field(factory=dict)
    last_delta: int = 0

    def add_repetitions(self, other: "PassCost", times: int = 1) -> "PassCost":
        """Return self + times * other; `peak_delta` is the maximum of both, to which the caller adds the growth."""
        kept = add_by_label(self.kept_bytes, other.kept_bytes, times, 0)
        if (freed := sum(size for size in kept.values() if size < 0)) and self.kept_bytes:
            # A block may free what a label counts, such as its input, and keep as much under another label.
            kept = {label: max(size, 0) for label, size in kept.items()}
            kept[max(kept, key=lambda label: kept[label])] += freed
        sums = {name: getattr(self, name) + times * getattr(other, name) for name in SUMMED}
        peak = max(self.peak_delta, other.peak_delta)
        return PassCost(
            **sums,
            peak_delta=peak,
            kept_bytes={label: size for label, size in kept.items() if size},
            work=add_by_label(self.work, other.work, times, Work()),
        )

    @property
    def total_kept_bytes(self) -> int:
        """Return the live bytes at the end."""
        return sum(self.kept_bytes.values())


SUMMED = ("seconds", "comm_seconds", "host", "flops", "net_delta", "link_seconds")
"""Costs that add up over passes."""

Links = Callable[[str], Link]
"""Return the link between ranks along a dimension of the mesh."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context to sum the costs of operations on meta tensors, for a device and attention fractions."""

    def __init__(self, device: DeviceModel, links: Links, fractions: AttentionFractions) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._links, self._fractions = device, links, fractions
        self._sizes: dict[weakref.ref[Any], tuple[int, str]] = {}
        self._now = self._peak = self._start = 0
        self._peak_before = self._missing = 0  # before the last block, and its own gradients' bytes
        self._cost = PassCost()
        self._label = ["other"]
        self._lead = math.inf  # seconds by which the host is ahead

    def label_storages_allocated_by_module(self, module: nn.Module, label: str) -> list[Any]:
        """Label the storages allocated in a module's forward pass; return the hooks' handles."""
        begin = module.register_forward_pre_hook(lambda *_: self._label.append(label))
        return [begin, module.register_forward_hook(lambda *_: self._label.pop() and None, always_call=True)]

    @contextmanager
    def label_new_storages(self, label: str) -> Iterator[None]:
        """Label storages allocated in this context, unless a module has its own label."""
        self._label.append(label)
        yield
        self._label.pop()

    def begin_pass(self) -> None:
        """Start recording a pass."""
        self._cost = PassCost()
        self._start = self._peak = self._peak_before = self._now
        self._missing = 0
        self._lead = math.inf

    def begin_last_block(self, gradient_bytes: int, *_: Any) -> None:
        """Start recording the peak of a backward pass's last block, whose own gradients are not there yet."""
        self._peak_before, self._peak, self._missing = self._peak, self._now, gradient_bytes

    def end_pass(self) -> PassCost:
        """Return the costs since `begin_pass`."""
        kept: Counter[str] = Counter()
        for size, label in self._sizes.values():
            kept[label] += size
        return attrs.evolve(
            self._cost,
            peak_delta=max(self._peak, self._peak_before) - self._start,
            last_delta=self._peak - self._start - self._missing,
            net_delta=self._now - self._start,
            kept_bytes=dict(kept),
        )

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # torch 2.11 does not infer the shape of a product that is added in a wider dtype; `out` has it already.
        result = kwargs["out"] if "out" in kwargs else function(*args, **kwargs)
        outputs = list_tensors(result)
        inputs = list_tensors([*args, *kwargs.values()])
        known = {tensor.untyped_storage()._cdata for tensor in inputs}
        new = [tensor for tensor in outputs if tensor.untyped_storage()._cdata not in known]
        for tensor in new:
            self._count_storage_once(tensor)
        if function.overloadpacket is COLLECTIVE:
            bound = bind_arguments(function, args, kwargs)
            if bound["kind"] == "wait":
                self._lead = 0.0
                return result
            sent = count_message_bytes(bound["x"], result, bound["kind"], bound["ranks"])
            link = self._links(bound["dimension"])
            seconds = link.estimate_seconds(sent)
            self._cost.comm_seconds += seconds
            self._add_work(bound["dimension"], Work(links=sent / link.bandwidth, planned=seconds))
        elif function.overloadpacket is COPY:
            self._cost.link_seconds += outputs[0].nbytes / self._device.host_link
        elif accesses_elements(function, bool(new)):
            self._count_operation(compute_operation_costs(function, args, kwargs, result), inputs, outputs)
        return result

    def _count_storage_once(self, tensor: Tensor) -> None:
        """Count a tensor's storage as alive, unless it is already counted."""
        storage = tensor.untyped_storage()
        reference = weakref.ref(storage, self._subtract_freed_storage)
        if reference not in self._sizes:
            # Allocators hand out whole blocks of 512 bytes.
            self._sizes[reference] = size, _ = -(-storage.nbytes() // 512) * 512, self._label[-1]
            self._now += size
            self._peak = max(self._peak, self._now)

    def _subtract_freed_storage(self, reference: Any) -> None:
        """Subtract a storage's bytes when Python frees it."""
        self._now -= self._sizes.pop(reference)[0]

    def _add_work(self, kind: str, work: Work) -> None:
        """Add an operation's seconds on host and device, which waits for the host after the host waited for it."""
        host = self._device.reached.host
        idle = max(0.0, host - self._lead)
        self._lead += idle - host + work.planned
        self._cost.host += host
        self._cost.seconds += idle + work.planned
        self._cost.work = add_by_label(self._cost.work, {kind: work, COUNTS: Work(planned=idle)}, 1, Work())

    def _count_operation(self, costs: OperationCosts, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Add an operation's FLOPs, and its seconds on device and host."""
        reached = self._device.reached
        flops = costs.flops * (self._fractions.pairs if costs.is_attention else 1.0)
        work = flops if costs.is_attention else costs.equivalent_flops
        dtype = _narrowest_dtype(inputs or outputs)
        rate = self._device.compute_achieved_matmul_flop_rate(dtype)
        if costs.is_attention:
            rate *= reached.attention / reached.products
            rate /= 1 - self._fractions.packed + self._fractions.packed / reached.packed
        self._cost.flops += flops
        moved = sum(tensor.nbytes for tensor in (*inputs, *outputs))
        scratch = 2 * costs.scratch * costs.is_attention
        arithmetic, traffic = work / rate, (moved + scratch) / (self._device.bandwidth * reached.memory)
        seconds = arithmetic + traffic if costs.is_attention else max(arithmetic, traffic)
        by_flops, by_memory = flops / self._device.get_matmul_peak(dtype), moved / self._device.bandwidth
        kind = ATTENTION if costs.is_attention else PRODUCTS if flops else ELEMENTWISE
        longer, launched = max(by_flops, by_memory), seconds + reached.launch
        self._add_work(kind, Work(flops=by_flops, memory=by_memory, floor=longer, planned=launched))
        self._peak = max(self._peak, self._now + costs.scratch)


def _narrowest_dtype(inputs: Sequence[Tensor]) -> torch.dtype:
    """Return the narrowest input dtype: the dtype of the factors in a product, whose added sum may be wider."""
    dtypes = [tensor.dtype for tensor in inputs if tensor.is_floating_point()] or [inputs[0].dtype]
    return min(dtypes, key=lambda dtype: dtype.itemsize)


Passes = dict[str, PassCost]
"""Costs by op: F, and B or I and W."""


@attrs.frozen
class StageCosts:
    """
    Costs for a stage's passes of one microbatch, by op: F and B, and I and W if the backward pass can be split.

    `kept_bytes` of F are alive until the backward pass ends, `kept_bytes` of I until W ends. `sent` is the message size
    to the next stage, in bytes. A pass's deltas are relative to the live bytes at its beginning.
    """

    passes: Passes
    sent: int


Recordings = dict[Hashable, Any]
"""Recordings of a recipe's model and loss by cache key, shared by all plans of this recipe."""


@attrs.define(eq=False)
class StageCostRecorder:
    """
    Meter for a model's stages and microbatches (rows, length), split over the `context` group.

    Recordings are cached by stage, `rows` and `cache_key`, for example the collectives' links.
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
    fractions: AttentionFractions
    cache_key: Hashable = ()
    recordings: Recordings = attrs.field(factory=dict)
    frozen_model: FrozenModel | None = None
    _frozen_bytes: int = internal(0)
    _inputs: tuple[Any, Any, Batch] | None = None
    _hidden: Any = None

    def record_costs(self, stage: Stage, split: bool) -> StageCosts:
        """
        Record a stage's passes, and return its costs.

        The first stage must come first, because its outputs are the other stages' inputs.
        """
        blocks = [
            _Block(_make_block_key(block), _is_recomputed(stage.recompute, number), number)
            for number, block in enumerate(self.blocks(stage.module))
        ]
        if any(isinstance(block, HasCostKey) and block.cost_key is None for block in self.blocks(stage.module)):
            recorded, examples = [self._record_passes_with_only_blocks(stage, blocks, split)], []
        else:
            examples = _choose_examples(blocks)
            recorded = [
                self._record_passes_with_only_blocks(stage, examples[number::-1], split)
                for number in range(max(1, len(examples)))
            ]
        passes, added = dict(recorded[0]), [recorded[0]]
        for number, block in enumerate(examples[1:], 1):
            before = recorded[number - 1]
            more = {op: cost.add_repetitions(before[op], -1) for op, cost in recorded[number].items()}
            times = 1 if block in examples[number + 1 :] else blocks.count(block) - examples.count(block) + 1
            passes = {op: cost.add_repetitions(more[op], times) for op, cost in passes.items()}
            added.append(more)
        increments = dict(zip(examples, added, strict=False))  # a kind's last example has what each of its blocks adds
        for op, cost in passes.items():
            peaks = []
            for number, example in enumerate(examples):
                # Blocks before the example are as at its peak, whether recorded or not; those after it may have changed
                # the live bytes already, or not yet.
                shown = {block.number for block in examples[: number + 1]}
                after = [block for block in blocks[example.number + 1 :] if block.number not in shown]
                changes = [increments[block][op].net_delta for block in after]
                peak = recorded[number][op].peak_delta
                kept = cost.net_delta - recorded[number][op].net_delta
                peaks += [peak + sum(min(c, 0) for c in changes), peak + kept - sum(max(c, 0) for c in changes)]
            # The first block is recorded as its kind's last example, and runs after all others.
            last = recorded[max((i for i, example in enumerate(examples) if example == blocks[0]), default=0)][op]
            last_delta = last.last_delta + cost.net_delta - last.net_delta
            passes[op] = attrs.evolve(cost, peak_delta=max(peaks, default=cost.peak_delta), last_delta=last_delta)
        return StageCosts(passes, sum(leaf.nbytes for leaf in list_leaves(self._hidden) if isinstance(leaf, Tensor)))

    def _record_passes_with_only_blocks(self, stage: Stage, blocks: Sequence["_Block"], split: bool) -> Passes:
        """Record a stage's passes with only these blocks in place, or return the recording for an equal stage."""
        modules = self.blocks(stage.module)
        parameters = _make_outer_parameters_key(stage.module, modules)
        # By blocks, `blocks` says which are recomputed.
        recomputed = [modules[block.number] for block in blocks if block.is_recomputed]
        policy = stage.recompute if stage.recompute in ("selective", "quantized") else "blocks"
        features = stage.span.embedding, stage.span.head, policy
        passes: Passes = {}
        for is_split in (False, True) if split else (False,):
            key = (self.rows, self.cache_key, *features, parameters, tuple(blocks), is_split)
            if key not in self.recordings:
                with _bypass_other_blocks(modules, blocks):
                    first = modules[blocks[0].number] if blocks else None
                    shown = attrs.evolve(stage, blocks=recomputed, recompute=policy)
                    recorded = self._record_passes(shown, first, is_split)
                self.recordings[key] = recorded, self._hidden
            more, self._hidden = self.recordings[key]
            passes |= more
        return passes

    def _record_passes(self, stage: Stage, first: nn.Module | None, split: bool) -> Passes:
        """Record one microbatch's passes: F and B, or with `split` F, I and W; `first` is the stage's first block."""
        first_inputs, context, batch = self._make_meta_inputs()
        recorder, passes = Recorder(self.device, self.links, self.fractions), {}
        for parameter in stage.module.parameters():
            if parameter.requires_grad:
                # Gradients exist since an earlier microbatch (gradient accumulation), so that no pass allocates them.
                parameter.grad = torch.empty_like(parameter, dtype=self.gradient)
        fused = fuse_gradient_sums_on_meta() if self.device.is_gpu else nullcontext()
        with ExitStack() as hooks, fused, recorder:
            runner = StageRunner(stage, self.loss, split=split)  # it finds out whether sums are fused
            for handle in self._register_label_hooks(recorder, stage):
                hooks.callback(handle.remove)
            if first is not None:
                own = sum(p.numel() for p in first.parameters() if p.requires_grad) * self.gradient.itemsize
                begin = partial(recorder.begin_last_block, own)
                hooks.callback(first.register_forward_hook(partial(_call_before_backward, begin)).remove)
            with recorder.label_new_storages("hidden states"):
                inputs = (
                    first_inputs
                    if stage.index == 0
                    else require_grad_in_place(map_leaves(_allocate_like, self._hidden))
                )
            recorder.begin_pass()
            with recorder.label_new_storages("head and loss" if stage.span.head else "hidden states"):
                outputs = runner.forward(0, inputs, context, batch)
            if stage.index == 0 and not runner.last:
                self._hidden = copy_tree_to_meta(outputs)
            shapes = [copy_tree_to_meta(leaf) for leaf in list_floating_leaves(outputs)]
            del inputs, outputs
            passes["F"] = recorder.end_pass()
            calls: dict[str, Callable[..., Any]] = {"B": runner.backward}
            if split:
                calls = {"I": runner.backward_input, "W": lambda number, _: runner.backward_weight(number)}
            for op, run in calls.items():
                recorder.begin_pass()
                with recorder.label_new_storages("pending weight gradients"):
                    run(0, None if runner.last or op == "W" else [torch.empty_like(shape) for shape in shapes])
                passes[op] = recorder.end_pass()
        return passes

    def _register_label_hooks(self, recorder: Recorder, stage: Stage) -> Iterator[RemovableHandle]:
        """Label the storages by module name: blocks' children, and leaf modules outside blocks. Yield hook handles."""
        inside: set[nn.Module] = set()
        for block in self.blocks(stage.module):
            for name, child in block.named_children():
                yield from recorder.label_storages_allocated_by_module(child, name)
            inside |= set(block.modules())
        for name, part in stage.module.named_modules():
            if part not in inside and not [*part.children()]:
                yield from recorder.label_storages_allocated_by_module(part, name.rpartition(".")[2])

    def _make_meta_inputs(self) -> tuple[Any, Any, Batch]:
        """Return a microbatch on the meta device: model inputs, context and batch."""
        if self._inputs is None:
            try:
                batch = self.batch_type.make_meta_batch(self.rows, self.length)
            except NotImplementedError as error:
                raise UserError(f"a plan needs the shapes of batches, and {error}", 2) from error
            part: Any = None
            if self.context.size > 1:
                part = copy_tree_to_meta(ContextPart.for_rank(self.length, self.context))
                batch = part.select_own_tokens(batch)
            inputs, context = self.loss.inputs(batch)
            context = attrs.evolve(context, part=part)
            self._inputs = inputs, context, self._add_reference(inputs, context, batch)
        return self._inputs

    @property
    def frozen_model_bytes_per_microbatch(self) -> int:
        """Return the frozen model's bytes per microbatch, on the last stage's rank."""
        self._make_meta_inputs()
        return self._frozen_bytes

    def _add_reference(self, inputs: Any, context: Any, batch: Batch) -> Batch:
        """Add the reference model's values to a batch on the meta device, if the loss has one."""
        loss = self.loss
        if not isinstance(loss, Referenced) or loss.reference == "none":
            return batch
        values: Any = batch.weights
        if loss.reference == "model" and self.frozen_model is not None:
            values = self.frozen_model.infer_meta_outputs(
                inputs, context, lambda hidden, head: loss.reference_values(hidden, head, batch)
            )
            self._frozen_bytes = values.nbytes
        whole: Batch = loss.with_reference(batch, values)
        return whole


def _call_before_backward(call: Callable[..., None], _module: nn.Module, _arguments: Any, output: Any) -> None:
    """Call a function when a module's backward pass begins."""
    for leaf in list_leaves(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(call)  # type: ignore[no-untyped-call]
            return


def _allocate_like(leaf: Any) -> Any:
    """Allocate a tensor like this one; return other values unchanged."""
    return torch.empty_like(leaf) if isinstance(leaf, Tensor) else leaf


@attrs.frozen
class _Block:
    """Stage block with its number; blocks with the same costs are equal."""

    kind: Hashable
    is_recomputed: bool
    number: int = attrs.field(eq=False)


def _make_block_key(block: nn.Module) -> Hashable:
    """Return a key, equal for blocks with equal costs: type, parameters' shapes and dtypes, and `cost_key`."""
    parameters = [(name, p.shape, p.dtype, p.requires_grad) for name, p in block.named_parameters()]
    return type(block), tuple(parameters), block.cost_key if isinstance(block, HasCostKey) else None


def _make_outer_parameters_key(module: nn.Module, blocks: Sequence[nn.Module]) -> Hashable:
    """Return names, shapes and dtypes of the parameters outside the stage's blocks."""
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    outside = [(name, parameter) for name, parameter in module.named_parameters() if id(parameter) not in inside]
    return tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in outside)


def _is_recomputed(policy: Recompute, number: int) -> bool:
    """Return whether a recompute policy (activation checkpointing) covers a stage's block."""
    return policy == "blocks" or (isinstance(policy, int) and number % policy == 0)


def _choose_examples(blocks: Sequence[_Block]) -> list[_Block]:
    """
    Return the blocks to record, from the last to the first: one of each kind, but two of kinds whose first example also
    keeps what blocks share, such as masks.
    """
    examples: list[_Block] = []
    for block in reversed(blocks):
        alike = [example for example in examples if example.kind == block.kind]
        if alike.count(block) < (2 if alike[:1] == [block] else 1):
            examples.append(block)
    return examples


@contextmanager
def _bypass_other_blocks(blocks: Sequence[nn.Module], some: Sequence[_Block]) -> Iterator[None]:
    """Replace all other blocks by the identity, and restore every block's forward pass."""
    kept, before = {block.number for block in some}, [block.__dict__.get("forward") for block in blocks]
    for number, block in enumerate(blocks):
        if number not in kept:
            block.forward = lambda hidden, *_, **__: hidden
    try:
        yield
    finally:
        for block, forward in zip(blocks, before, strict=True):
            block.__dict__.pop("forward", None)
            if forward is not None:
                block.forward = forward
