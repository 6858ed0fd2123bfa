"""Router balance between experts."""

import re
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from drawloom import UserError, component, internal, setting
from drawloom.components.metrics.pass_sums import PassSums
from drawloom.ports import ExpertRouter, Mesh, MetricTotals, MetricValues, Stages, Step, Value, find_routers

LAYER = re.compile(r"^(?!loss\.)(?:.*\.)?layers\.(\d+)(?:\.|$)")  # a loss may have layers of its own


@component(impact="safe")
class ExpertLoad(PassSums):
    """
    `expert_imbalance/<layer>`, `router_entropy/<layer>` and `expert_tokens/<layer>/<expert>` for layers with experts.

    The imbalance is an expert's maximum token count divided by the mean: 1 for balanced experts, and experts divided by
    choices per token if all tokens choose the same experts. The entropy is the mean over the tokens' score entropies,
    in nats, at most log(experts). `expert_tokens` are the tokens sent to an expert. Values cover a whole step, all
    microbatches and ranks, without padding and evaluations. No token is dropped: the token counts of a layer's experts
    add up to all tokens times the choices per token.
    """

    stages: Stages
    mesh: Mesh
    by_expert: bool = setting("also report token counts by expert", default=False)

    _names: list[str] = internal(factory=list)
    _observed: list[tuple[ExpertRouter, Callable[[Tensor, Tensor], None]]] = internal(factory=list)

    def open(self) -> None:
        """Gather all stages' routers, and observe this rank's. Raises UserError if there are none."""
        local = {
            match[1] if (match := LAYER.match(path)) else path: router
            for path, router in find_routers(self.stages).items()
        }
        by_rank = self.mesh.pipeline_group.gather_json({name: router.num_experts for name, router in local.items()})
        sizes: dict[str, int] = {name: size for rank_sizes in by_rank for name, size in rank_sizes.items()}
        if not sizes:
            raise UserError("no layer of the model has experts; leave out metrics.expert_load", 2)
        self._names = sorted(sizes, key=lambda name: (len(name), name))
        # token counts by expert, the sum of entropies, and the number of tokens
        self.allocate_sums(len(sizes), max(sizes.values()) + 2)
        for name, router in local.items():
            observer = self._make_load_counter(self._names.index(name))
            router.add_routing_observer(observer)
            self._observed.append((router, observer))

    def close(self) -> None:
        """Stop observing routers."""
        while self._observed:
            router, observer = self._observed.pop()
            router.remove_routing_observer(observer)

    def compute(self, totals: MetricTotals, step: Step) -> MetricValues:
        """Return the values, None for layers without tokens; `sums` are float64 (layers, experts + 2)."""
        return dict(
            value
            for name, row in zip(self._names, totals["sums"], strict=True)
            for value in self._compute_layer_values(name, row)
        )

    def _compute_layer_values(self, layer_name: str, layer_sums: Tensor) -> Iterator[tuple[str, Value]]:
        """Yield a layer's values from its row in the totals (experts + 2,)."""
        tokens, entropy, count = layer_sums[:-2], float(layer_sums[-2]), float(layer_sums[-1])
        yield f"expert_imbalance/{layer_name}", float(tokens.max() / tokens.mean()) if count else None
        yield f"router_entropy/{layer_name}", entropy / count if count else None
        if self.by_expert:
            yield from (
                (f"expert_tokens/{layer_name}/{expert}", number) for expert, number in enumerate(tokens.tolist())
            )

    def _make_load_counter(self, layer_index: int) -> Callable[[Tensor, Tensor], None]:
        """Return a function to add a router's token counts and score entropies to a layer's sums."""

        def add(tokens: Tensor, scores: Tensor) -> None:
            row = self._sums[layer_index]
            row[:-2] += tokens
            row[-2] -= torch.special.xlogy(scores, scores).sum(dtype=torch.float64)
            row[-1] += scores.any(-1).sum()  # padding has no scores

        return add
