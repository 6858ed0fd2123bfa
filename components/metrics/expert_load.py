"""How routers share tokens out to experts."""

import re
from collections.abc import Callable, Iterator, Mapping

import attrs
import torch
from torch import Tensor

from drawloom.components.ports.distributed import Device, Mesh
from drawloom.components.ports.experts import ExpertRouter, routers_of
from drawloom.components.ports.run import Accumulator, Step, Value
from drawloom.components.ports.stages import Stages
from drawloom.graph import UserError, component, setting

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@component(impact="safe")
class ExpertLoad:
    """
    For each layer with experts `expert_imbalance/<layer>`, `router_entropy/<layer>`, and what experts have had.

    The imbalance is the tokens of the expert with most, divided by the mean: 1 where all have the same number, and the
    number of experts divided by the choices where all tokens choose the same. The entropy is that of the scores of a
    token, in nats, a mean over tokens; at most log(experts). `expert_tokens/<layer>/<expert>` are the tokens that were
    sent to an expert. Each of them is of a whole step, over all microbatches and ranks, evaluations left out. No token
    is ever dropped: the tokens of a layer's experts add up to all tokens, times the choices of each.
    """

    stages: Stages
    mesh: Mesh
    device: Device
    by_expert: bool = setting(default=False, doc="whether to write down the tokens of each expert, too")

    _names: list[str] = attrs.field(init=False, factory=list)
    _experts: int = attrs.field(init=False, default=0)
    _sums: Tensor = attrs.field(init=False, default=None)
    _observed: list[tuple[ExpertRouter, Callable[[Tensor, Tensor], None]]] = attrs.field(init=False, factory=list)

    def open(self) -> None:
        """Learn the routers of all stages, and observe those of this rank; UserError if there are none."""
        mine = {_name(path): router for path, router in routers_of(self.stages).items()}
        sizes = self.mesh.pipeline_group.gather_json({name: router.num_experts for name, router in mine.items()})
        every: dict[str, int] = {name: size for each in sizes for name, size in each.items()}
        if not every:
            raise UserError("no layer of the model has experts; leave out metrics.expert_load", 2)
        self._names = sorted(every, key=lambda name: (len(name), name))
        self._experts = max(every.values())
        shape = self.accumulators["sums"].shape
        self._sums = torch.zeros(shape, dtype=torch.float64, device=self.device.device)
        for name, router in mine.items():
            observer = self._observer(self._names.index(name))
            router.observe(observer)
            self._observed.append((router, observer))

    def close(self) -> None:
        """Observe no routers any more."""
        while self._observed:
            router, observer = self._observed.pop()
            router.ignore(observer)

    @property
    def accumulators(self) -> Mapping[str, Accumulator]:
        """By layer, the tokens of each expert, the sum of entropies, and of how many tokens it is."""
        return {"sums": Accumulator(shape=(len(self._names), self._experts + 2), of="activations")}

    def update(self, step: Step) -> Mapping[str, Tensor]:
        """Sums over the forward passes since the last step: float64 (layers, experts + 2)."""
        sums = self._sums.clone()
        self._sums.zero_()  # in place: observers that are part of a CUDA graph add to this tensor
        return {"sums": sums}

    def compute(self, totals: Mapping[str, Tensor], step: Step) -> Mapping[str, Value]:
        """None where a layer had no token; `sums` are float64 (layers, experts + 2)."""
        return dict(
            value for name, row in zip(self._names, totals["sums"], strict=True) for value in self._of(name, row)
        )

    def _of(self, name: str, row: Tensor) -> Iterator[tuple[str, Value]]:
        """The values of a layer, from its row of the totals (experts + 2,)."""
        tokens, entropy, count = row[:-2], float(row[-2]), float(row[-1])
        yield f"expert_imbalance/{name}", float(tokens.max() / tokens.mean()) if count else None
        yield f"router_entropy/{name}", entropy / count if count else None
        if self.by_expert:
            yield from ((f"expert_tokens/{name}/{expert}", number) for expert, number in enumerate(tokens.tolist()))

    def _observer(self, place: int) -> Callable[[Tensor, Tensor], None]:
        def add(tokens: Tensor, scores: Tensor) -> None:
            row = self._sums[place]
            row[:-2] += tokens
            row[-2] -= torch.special.xlogy(scores, scores).sum(dtype=torch.float64)
            row[-1] += scores[..., 0].numel()

        return add


def _name(path: str) -> str:
    """The number of a router's layer, or the whole name of one that is in no such layer."""
    found = LAYER.search(f"{path}.")
    return found[1] if found else path
