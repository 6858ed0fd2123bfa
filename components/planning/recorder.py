"""
Records what a module does on the meta device: bytes that live, and the seconds that its operations would take.

A meta tensor has a storage without memory, which lives as long as a real one would, so that the sum of the storages
that live is what an allocator would have given out. An operation takes as long as its arithmetic or its memory traffic
needs, whichever is more (Williams et al. 2009, "Roofline", CACM 52(4)), and no less than a launch. Attention takes as
long as both: kernels before and after its products sum and round.
"""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drawloom.components.distributed.device_model import DeviceModel
from drawloom.components.parallel.meta_collectives import sent_bytes
from drawloom.components.planning.attention import Attended


@attrs.frozen
class PassCost:
    """
    What was recorded of a pass.

    `seconds` are those of the device, of which `sending` in collectives that the pass waits for; `host` are those of
    the host that issues it; `flops` the operations of matrix products. `rise` is the most bytes that lived beyond those
    at its start, and `grown` those that do after it, less than 0 if it frees more than it makes; `held` are the bytes
    that live after it, by what made them.
    """

    seconds: float = 0.0
    sending: float = 0.0
    host: float = 0.0
    flops: float = 0.0
    rise: int = 0
    grown: int = 0
    held: Mapping[str, int] = attrs.field(factory=dict)

    def plus(self, other: "PassCost", times: int = 1) -> "PassCost":
        """This one and another, which runs several times before or after it; `rise` is the greater of both."""
        labels = dict.fromkeys([*self.held, *other.held])
        held = {label: self.held.get(label, 0) + times * other.held.get(label, 0) for label in labels}
        return PassCost(
            seconds=self.seconds + times * other.seconds,
            sending=self.sending + times * other.sending,
            host=self.host + times * other.host,
            flops=self.flops + times * other.flops,
            rise=max(self.rise, other.rise),
            grown=self.grown + times * other.grown,
            held={label: size for label, size in held.items() if size},
        )

    @property
    def held_bytes(self) -> int:
        """All bytes that live after it."""
        return sum(self.held.values())


Links = Callable[[str], float]
"""The bytes/s that a rank sends to others along a dimension of the mesh."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which operations on meta tensors are recorded, for a device, and what attention looks at."""

    def __init__(self, device: DeviceModel, links: Links, attended: Attended) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._links, self._attended = device, links, attended
        self._sizes: dict[weakref.ref[Any], tuple[int, str]] = {}
        self._now = self._peak = self._start = 0
        self._seconds = self._sending = self._host = self._flops = 0.0
        self._label = ["other"]

    def labelled(self, module: nn.Module, label: str) -> list[Any]:
        """Storages made in the forward pass of a module get this label; the handles of its hooks."""
        begin = module.register_forward_pre_hook(lambda *_: self._label.append(label))
        return [begin, module.register_forward_hook(lambda *_: self._label.pop() and None, always_call=True)]

    @contextmanager
    def label(self, label: str) -> Iterator[None]:
        """Storages made in this context get this label, unless a module has its own."""
        self._label.append(label)
        yield
        self._label.pop()

    def begin(self) -> None:
        """A pass begins."""
        self._seconds = self._sending = self._host = self._flops = 0.0
        self._start = self._peak = self._now

    def end(self) -> PassCost:
        """What was recorded since `begin`."""
        held: Counter[str] = Counter()
        for size, label in self._sizes.values():
            held[label] += size
        rise, grown = self._peak - self._start, self._now - self._start
        return PassCost(self._seconds, self._sending, self._host, self._flops, rise, grown, dict(held))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch 2.11 has no shapes for a product that is added in a wider dtype; what it is added to has them.
        added = function is torch.ops.aten.addmm.dtype_out
        result = kwargs["out"] if added else function(*args, **(kwargs or {}))
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        known = {each.untyped_storage()._cdata for each in given}
        new = [each for each in made if each.untyped_storage()._cdata not in known]
        for tensor in new:
            self._add(tensor)
        name = function._overloadpacket.__name__ if hasattr(function, "_overloadpacket") else str(function)
        self._count(name, args, given, made, len(new) < len(made))
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        reference = weakref.ref(storage, self._drop)
        if reference not in self._sizes:
            # Allocators give out whole blocks of 512 bytes.
            self._sizes[reference] = size, _ = -(-storage.nbytes() // 512) * 512, self._label[-1]
            self._now += size
            self._peak = max(self._peak, self._now)

    def _drop(self, reference: Any) -> None:
        self._now -= self._sizes.pop(reference)[0]

    def _count(self, name: str, args: Any, given: Sequence[Tensor], made: Sequence[Tensor], aliases: bool) -> None:
        if (aliases and name in VIEWS) or name in FREE or not (made or given):
            return
        reached = self._device.reached
        if name == "collective":
            x, _, kind, dimension, ranks = args
            seconds = sent_bytes(x, made[0], kind, ranks) / self._links(dimension)
            self._seconds += seconds
            self._sending += seconds
            return
        flops = _products(name, args, made) * (self._attended.pairs if name in ATTENTION else 1.0)
        # Of what is added to, the dtype may be wider than that of the factors.
        rate = self._device.product_rate(given[1 if "add" in name else 0].dtype) if flops else math.inf
        if name in ATTENTION:
            rate *= reached.attention / reached.products
            rate /= 1 - self._attended.packed + self._attended.packed / reached.packed
        self._flops += flops
        scratch, attends = _scratch(name, args), name in ATTENTION
        moved = sum(each.nbytes for each in (*given, *made)) + 2 * scratch * attends
        arithmetic, traffic = flops / rate, moved / (self._device.bandwidth * reached.memory)
        self._seconds += max(arithmetic + traffic if attends else max(arithmetic, traffic), reached.launch)
        self._host += reached.host
        self._peak = max(self._peak, self._now + scratch)


ATTENTION = {"attention", "attention_backward"}

VIEWS = {
    *("view", "_unsafe_view", "reshape", "transpose", "t", "permute", "expand", "slice", "select", "split", "chunk"),
    *("detach", "alias", "unsqueeze", "squeeze", "unbind", "as_strided", "narrow", "movedim", "flatten", "lift_fresh"),
    *("split_with_sizes", "_reshape_alias", "view_as", "diagonal", "unfold"),
}
"""Operations that read and write nothing, if their result shares memory with an argument."""

FREE = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_local_scalar_dense", "is_same_size"}


def _products(name: str, args: Any, made: Sequence[Tensor]) -> float:
    """Floating-point operations of the matrix products inside of an operation."""
    match name:
        case "mm" | "addmm" | "bmm" | "baddbmm" | "_int_mm":
            first = args[1] if "add" in name else args[0]
            return 2.0 * made[0].numel() * int(first.shape[-1])
        case "attention":
            return attention_flops(args[0].numel(), args[1].shape[1])
        case "attention_backward":
            return attention_flops(args[1].numel(), args[2].shape[1], backward=True)
        case "linear_cross_entropy_grad_logits" | "cut_cross_entropy":
            return 2.0 * int(args[0].numel()) * len(args[1])
        case "linear_cross_entropy":
            return 2.0 * int(args[0].numel()) * len(args[1]) * (1 + int(args[5]) + int(args[6]))
        case "cut_cross_entropy_backward":
            return 2.0 * int(args[0].numel()) * len(args[1]) * (1 + int(args[10]) + int(args[11]))
        case "grouped_gemm_rows" | "grouped_gemm_rows_eager" | "grouped_gemm_matrices" | "grouped_gemm_matrices_eager":
            return 2.0 * int(args[0].numel()) * int(args[1].shape[-1])
        case "_grouped_mm":
            return 2.0 * int(args[0].numel()) * int(args[1].shape[-1])
    return 0.0


def attention_flops(queries: int, keys: int, *, backward: bool = False) -> float:
    """
    Operations of attention, for elements of all queries and the number of keys of each.

    A backward pass computes the scores again: five products for two of a forward pass.
    """
    return (10.0 if backward else 4.0) * queries * keys


def _logits(hidden: Tensor, weight: Tensor, most: int) -> int:
    """Bytes of the logits that exist together."""
    return min(len(hidden) * len(weight), most) * hidden.dtype.itemsize


def _scratch(name: str, args: Any) -> int:
    """Bytes that exist inside of an operation alone: of logits, or of gradients before they are summed and rounded."""
    if name == "linear_cross_entropy":
        return _logits(args[0], args[1], args[7])
    if name == "cut_cross_entropy_backward":
        hidden, weight, filter_eps, max_logits, needs_weight = args[0], args[1], args[6], args[9], args[11]
        sums = 4 * int(weight.numel()) if needs_weight and weight.dtype != torch.float32 else 0
        # A filter sorts a copy of the weight.
        return _logits(hidden, weight, max_logits) + sums + (int(weight.nbytes) if filter_eps else 0)
    if name == "attention_backward":
        # cuDNN sums gradients of queries in float32, and has those of keys and values by head of the queries.
        _, q, k, _ = args
        return int(q.numel()) * 4 + (2 * int(q.nbytes) if k.shape[2] < q.shape[2] else 0)
    return 0
