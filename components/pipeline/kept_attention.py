"""Results of attention in recomputed blocks, kept for the backward pass."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from drawloom import NodeView, Problem, component
from drawloom.kernels.recompute.marks import kept_results
from drawloom.kernels.recompute.saved_tensors import KeptTensor
from drawloom.ports import StageFeature, StageNodes

ATTENTION = {
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_flash_attention_forward",
    "drawloom::attention",
}
"""Operators for attention; the last one is a plan's."""


@component(impact="safe")
class KeptAttention(StageFeature):
    """
    Results of attention in recomputed blocks, kept for the backward pass, in which all other operations run again.

    Attention's time grows with the square of a row's length, and its results with the length. A result is as large as a
    block's input. It is kept for cuDNN's, flash and torch's own attention, and computed again by flex attention and
    Triton's kernels.
    """

    excludes: ClassVar[Mapping[str, str]] = {"stages.compiled": "torch chooses what compiled blocks keep"}
    keeps_layer_shapes: ClassVar[bool] = True

    @classmethod
    def check_stages(cls, feature: NodeView, nodes: StageNodes) -> Iterator[Problem]:
        """Yield a problem if the stages recompute no block."""
        policy = nodes.stages.settings["recompute"]
        if isinstance(policy, str) and policy != "blocks" and nodes.stages.neighbour("memory") is None:
            text = "without recomputed blocks all results are kept anyway"
            yield feature.problem(
                "use", text, f'write recompute = "blocks" in [{nodes.stages.name}], or remove this table'
            )

    def finish(self, modules: Sequence[nn.Module], blocks: Sequence[nn.Module]) -> None:
        for block in blocks:
            block.forward = partial(_forward_keeping_attention, block.forward)

    place_on_meta = finish


def _forward_keeping_attention(forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    if (kept := kept_results.get()) is None:
        return forward(*arguments, **named)
    with _Attention(kept):
        return forward(*arguments, **named)


class _Attention(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keep the results of attention in an empty list, or take them from a list of an earlier call."""

    def __init__(self, kept: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept, self._repeated = kept, iter([*kept]) if kept else None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch compile flex attention inside."""
        return True

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator.name() not in ATTENTION:
            return operator(*args, **(kwargs or {}))
        if self._repeated is not None:
            return tuple(
                x.get_or_recompute().detach() if isinstance(x, KeptTensor) else x for x in next(self._repeated)
            )
        results = operator(*args, **(kwargs or {}))
        self._kept.append([KeptTensor(x) if isinstance(x, Tensor) else x for x in results])
        return results
