"""
Recorder for a module's passes on the meta device: live bytes, and the operations' estimated seconds.

A meta tensor has a storage without memory, with the lifetime of a real one. So the live storages' sum is the memory an
allocator would have handed out. An operation takes as long as its arithmetic or its memory traffic, whichever is more
(Williams et al. 2009, "Roofline", CACM 52(4)), and no less than a launch. Attention takes both, one after the other,
because kernels before and after its products sum and round. FLOPs and scratch memory are registered with the operations
(`kernels/costs.py`).
"""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from drawloom.components.distributed.device_model import DeviceModel
from drawloom.components.parallel.meta_collectives import COLLECTIVE, count_message_bytes
from drawloom.components.pipeline.runtime.p2p import list_tensors
from drawloom.components.planning.attention import AttentionFractions
from drawloom.kernels.costs import OperationCosts, accesses_elements, bind_arguments, compute_operation_costs
from drawloom.kernels.host_copies import COPY


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


Amount = TypeVar("Amount", int, Work)


def add_by_label(
    first: Mapping[str, Amount], second: Mapping[str, Amount], times: int, zero: Amount
) -> dict[str, Amount]:
    """Return first + times * second by label; a missing label counts as `zero`."""
    labels = dict.fromkeys([*first, *second])
    return {label: first.get(label, zero) + second.get(label, zero) * times for label in labels}


@attrs.define
class PassCost:
    """
    Costs of one pass.

    `seconds` is the time on the device, including `comm_seconds`, waits for collectives. `host` is the host's time to
    issue the pass; `link_seconds` is the time for copies on the link to host memory; `flops` counts matrix
    products. `peak_delta` is the peak of the live bytes and `net_delta` their
    number at the end, both relative to the start; `net_delta` is negative if the pass frees more than it allocates.
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

Links = Callable[[str], float]
"""Return the bytes per second that a rank sends to others along a dimension of the mesh."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context to sum the costs of operations on meta tensors, for a device and attention fractions."""

    def __init__(self, device: DeviceModel, links: Links, fractions: AttentionFractions) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._links, self._fractions = device, links, fractions
        self._sizes: dict[weakref.ref[Any], tuple[int, str]] = {}
        self._now = self._peak = self._start = 0
        self._cost = PassCost()
        self._label = ["other"]

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
        self._start = self._peak = self._now

    def end_pass(self) -> PassCost:
        """Return the costs since `begin_pass`."""
        kept: Counter[str] = Counter()
        for size, label in self._sizes.values():
            kept[label] += size
        peak_delta, net_delta = self._peak - self._start, self._now - self._start
        return attrs.evolve(self._cost, peak_delta=peak_delta, net_delta=net_delta, kept_bytes=dict(kept))

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
            sent = count_message_bytes(bound["x"], result, bound["kind"], bound["ranks"])
            seconds = sent / self._links(bound["dimension"])
            self._cost.comm_seconds += seconds
            self._add_work(bound["dimension"], Work(links=seconds * self._device.reached.messages, planned=seconds))
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
        """Add an operation's seconds on the device."""
        self._cost.seconds += work.planned
        self._cost.work = add_by_label(self._cost.work, {kind: work}, 1, Work())

    def _count_operation(self, costs: OperationCosts, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Add an operation's FLOPs, and its seconds on device and host."""
        reached = self._device.reached
        flops = costs.flops * (self._fractions.pairs if costs.is_attention else 1.0)
        work = flops if costs.is_attention else costs.equivalent_flops
        rate = self._device.compute_achieved_matmul_flop_rate(_narrowest_dtype(inputs)) if flops else math.inf
        peak = rate / reached.products
        if costs.is_attention:
            rate *= reached.attention / reached.products
            rate /= 1 - self._fractions.packed + self._fractions.packed / reached.packed
        self._cost.flops += flops
        moved = sum(tensor.nbytes for tensor in (*inputs, *outputs))
        scratch = 2 * costs.scratch * costs.is_attention
        arithmetic, traffic = work / rate, (moved + scratch) / (self._device.bandwidth * reached.memory)
        seconds = arithmetic + traffic if costs.is_attention else max(arithmetic, traffic)
        by_flops, by_memory = flops / peak, moved / self._device.bandwidth
        kind = ATTENTION if costs.is_attention else PRODUCTS if flops else ELEMENTWISE
        longer, launched = max(by_flops, by_memory), max(seconds, reached.launch)
        self._add_work(kind, Work(flops=by_flops, memory=by_memory, floor=longer, planned=launched))
        self._cost.host += reached.host
        self._peak = max(self._peak, self._now + costs.scratch)


def _narrowest_dtype(inputs: Sequence[Tensor]) -> torch.dtype:
    """Return the narrowest input dtype: the dtype of the factors in a product, whose added sum may be wider."""
    dtypes = [tensor.dtype for tensor in inputs if tensor.is_floating_point()] or [inputs[0].dtype]
    return min(dtypes, key=lambda dtype: dtype.itemsize)
