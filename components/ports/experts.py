"""Ports for mixture-of-experts models: token dispatch and routers."""

from collections.abc import Callable, Iterator
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from drawloom import port
from drawloom.components.ports.stages import Stages


class Dispatched(NamedTuple):
    """
    Token copies on their experts' rank: `rows` (rows, width), sorted by expert, their probabilities `scale` (rows,),
    and row ends by expert, `ends`, int32 (this rank's experts,).

    `combine` maps the experts' outputs for the rows, (rows, width), to sums (tokens, width) for this rank's tokens.
    Rows past the last end have undefined contents.
    """

    rows: Tensor
    scale: Tensor
    ends: Tensor
    combine: Callable[[Tensor], Tensor]


@port
class Dispatcher(Protocol):
    """Dispatcher from tokens to their chosen experts and back, differentiable in both directions."""

    def dispatch(self, hidden: Tensor, chosen: Tensor, probabilities: Tensor, num_experts: int) -> Dispatched:
        """
        Return one row per choice that any rank's token makes among this rank's experts.

        hidden: (tokens, width); chosen: integers (tokens, choices) from 0 to num_experts - 1, or -1 for a dropped
        choice; probabilities: (tokens, choices), at least float32. If several ranks share the experts, all of them call
        this and `combine` in the same order, also without tokens.
        """


@port
class RowLimit(Protocol):
    """A dispatcher with room for a limited number of rows, without a count before they come."""

    @property
    def graph_values(self) -> object:
        """Values in CUDA graphs from their recording; equal on all ranks."""

    def grow_if_rows_were_dropped(self) -> bool:
        """
        Return whether passes had more rows than room on any rank, and make room for them. A collective.

        The gradients of such passes are wrong; they are not finite.
        """


@runtime_checkable
class ExpertParallelDispatcher(Protocol):
    """A dispatcher between ranks along the mesh dimension `expert`."""

    supports_expert_parallel: ClassVar[bool]


def supports_expert_parallel(dispatcher: object) -> bool:
    """Return whether a dispatcher, an object or a class, sends tokens to experts on other ranks."""
    return isinstance(dispatcher, ExpertParallelDispatcher) and dispatcher.supports_expert_parallel


ObserveRouting = Callable[[Tensor, Tensor], None]
"""
Callback for the routing of a microbatch: the number of choices of each expert, int64 (experts,), and the scores, at
least float32 (tokens, experts), which add up to 1 by token and have no autograd graph. Padding is not counted, and its
scores are 0.
"""


@runtime_checkable
class ExpertRouter(Protocol):
    """
    A module that assigns tokens to experts.

    `e_score_correction_bias`, a persistent buffer, float32 (num_experts,), is added to the scores for the choice of
    experts; None without such a bias.
    """

    num_experts: int
    e_score_correction_bias: Tensor | None

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the router's parameters, like `nn.Module.parameters`."""

    def choose_experts(self, scores: Tensor) -> Tensor:
        """Choose experts by scores (..., experts), plus bias: int64 (..., choices); features replace this method."""

    def add_routing_observer(self, observer: ObserveRouting) -> None:
        """Call `observer` once per microbatch in training's forward passes from now on."""

    def remove_routing_observer(self, observer: ObserveRouting) -> None:
        """Stop calling `observer`."""


def find_routers(stages: Stages) -> dict[str, ExpertRouter]:
    """Return the routers in this rank's stages by name."""
    named_modules = (item for stage in stages.local for item in stage.module.named_modules())
    return {name: module for name, module in named_modules if isinstance(module, ExpertRouter)}
