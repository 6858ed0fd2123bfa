"""What passes from stage to stage: shapes and dtypes, found by sending meta tensors through the blueprint."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.ports.model import BatchContext, LayerRange
from drawloom.components.storage.pytree import branches, leaves, transform

Key = tuple[Any, ...]


@attrs.define(eq=False)
class ActivationSpecs:
    """
    Knows the tree of tensors that each stage takes, for microbatches of any shape.

    `build` makes the module of a span on the meta device. Each module is built, and each shape sent through, once.
    """

    spans: Sequence[LayerRange]
    build: Callable[[LayerRange], nn.Module]
    _modules: dict[int, nn.Module] = attrs.field(factory=dict)
    _known: dict[Key, Any] = attrs.field(factory=dict)

    def of(self, stage: int, tokens: Tensor, shared: BatchContext) -> Any:
        """What a stage takes for a microbatch, as a tree of meta tensors; what is no tensor stands for itself."""
        key = (stage, tokens.shape, tokens.dtype)
        if key not in self._known:
            self._known[key] = self._find(stage, tokens, shared)
        return self._known[key]

    def _find(self, stage: int, tokens: Tensor, shared: BatchContext) -> Any:
        if stage == 0:
            return on_meta(tokens)
        before = self.of(stage - 1, tokens, shared)
        with torch.no_grad():
            return on_meta(self._module(stage - 1)(before, on_meta(shared)))

    def _module(self, stage: int) -> nn.Module:
        if stage not in self._modules:
            self._modules[stage] = self.build(self.spans[stage])
        return self._modules[stage]


def on_meta(tree: Any) -> Any:
    """The tree with its tensors replaced by contiguous ones that hold nothing."""
    return transform(lambda leaf: torch.empty_like(leaf, device="meta") if isinstance(leaf, Tensor) else leaf, tree)


def mismatch(payload: Any, expected: Any, path: str = "") -> str | None:
    """
    How a tree of tensors differs from the one that the receiver makes room for; None if it doesn't.

    Structures, shapes and dtypes are compared, and the values of leaves that are no tensors, since the receiver takes
    its own for them.
    """
    if isinstance(payload, Tensor) and isinstance(expected, Tensor):
        if payload.shape == expected.shape and payload.dtype == expected.dtype:
            return None
        return f"leaf {path or 'itself'} is {_written(payload)}, and {_written(expected)} is expected"
    found, wanted = branches(payload), branches(expected)
    if found is None or wanted is None or type(payload) is not type(expected):
        same = found is None and wanted is None and type(payload) is type(expected) and bool(payload == expected)
        return None if same else f"leaf {path or 'itself'} is {_written(payload)}, and {_written(expected)} is expected"
    if [name for name, _ in found] != [name for name, _ in wanted]:
        where = f" in {path}" if path else ""
        return f"there are {len(leaves(payload))} leaves{where}, and {len(leaves(expected))} are expected"
    parts = zip(found, wanted, strict=True)
    return next(filter(None, (mismatch(part, other, path + name) for (name, part), (_, other) in parts)), None)


def _written(leaf: Any) -> str:
    """A leaf in words: dtype and shape of a tensor."""
    if not isinstance(leaf, Tensor):
        return repr(leaf) if branches(leaf) is None else f"a {type(leaf).__name__}"
    return f"{str(leaf.dtype).removeprefix('torch.')} of shape {tuple(leaf.shape)}"
