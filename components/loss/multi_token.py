"""Multi-token prediction (MTP): extra layers predict further tokens (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""

from collections.abc import Iterator
from functools import cached_property, partial
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from drawloom import NodeView, Problem, UserError, above, between, component, setting
from drawloom.components.loss.next_token import NextToken
from drawloom.ports import (
    BufferOwner,
    Head,
    HiddenStates,
    LanguageModel,
    LayerRange,
    LossSums,
    Mesh,
    SplitModel,
    TokenBatch,
    TokenContext,
    embeds_on_every_rank,
)

MAX_DEPTH = 16


class PredictionLayer(nn.Module):
    """One more layer like a model's last, on projected hidden states and embeddings."""

    def __init__(self, model: LanguageModel, width: int, eps: float) -> None:
        super().__init__()
        self.enorm, self.hnorm, self.norm = (nn.RMSNorm(width, eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        count = model.num_hidden_layers
        self.layer = model.build(LayerRange(count - 1, count, embedding=False, head=False))
        for name, owner in self.layer.named_modules():
            has_buffers = any(True for _ in owner.buffers(recurse=False))
            reset = owner.reset_parameters if has_buffers and isinstance(owner, BufferOwner) else None
            owner.reset_parameters = partial(_fill_parameters, model, name, owner, reset)

    def forward(self, hidden: Tensor, embedded: Tensor, context: TokenContext) -> Tensor:
        """Map hidden states (rows, length, width) and the next tokens' embeddings, in this shape, to hidden states."""
        hidden, embedded = (x.to(self.eh_proj.weight.dtype) for x in (hidden, embedded))
        joined = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))
        output: Tensor = self.layer(joined, context)
        return output


def _fill_parameters(model: LanguageModel, name: str, owner: nn.Module, reset: Any) -> None:
    """Fill the parameters in a layer's module `name` like the model's, seeded by torch's generator."""
    if reset is not None:
        reset()
    for key, parameter in owner.named_parameters(recurse=False):
        model.initialize_parameter(f"{name}.{key}", parameter, torch.initial_seed())


@component
class MultiToken(NextToken):
    """
    Cross entropy for the next token and, by extra layers on the last hidden states, for `depth` tokens after it.

    Embedding and head are the model's. The extra layers are trained in `precision.parameter`, whole on every rank, and
    are in checkpoints but not in exports. Beside the sums in `loss.next_token` there is `further_cross_entropy`, a mean
    over depths.
    """

    model: LanguageModel
    mesh: Mesh
    depth: int = setting("further tokens to predict, by a layer for one", default=1, check=between(1, MAX_DEPTH + 1))
    coefficient: float = setting("multiplier for the further tokens' mean cross entropy", default=0.3, check=above(0))

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Report ranks along `tensor` or `context`, circular pipelines, and last layers with links to others."""
        mesh, model = node.neighbour("mesh"), node.neighbour("model")
        for dimension in ("tensor", "context"):
            if mesh is not None and mesh.settings.get(dimension, 1) != 1:
                text = f"[{node.name}] predicts further tokens on whole rows and products"
                yield mesh.problem(dimension, text, f"write {dimension} = 1")
        if any(embeds_on_every_rank(other.spec.cls) for other in node.nodes.values()):
            text = "the circular pipeline passes only hidden states, and further tokens need embeddings, too"
            yield node.problem("use", text, "write use = 'loss.next_token', or use another schedule")
        if model is not None and issubclass(model.component, SplitModel):
            for fault in model.component.find_split_faults(model, "pipeline", 2):
                text = f"[{node.name}] has layers like the model's last one, which can't run alone: {fault}"
                yield node.problem("use", text, "write use = 'loss.next_token'")

    @cached_property
    def module(self) -> nn.Module | None:
        """The extra layers, on the meta device until the stages are materialized."""
        config = self.model.hugging_face_config()
        if not isinstance(width := config.get("hidden_size"), int):
            raise UserError("further tokens need hidden_size, but the model's config.json has no such key", 2)
        with torch.device("meta"):
            eps = config.get("rms_norm_eps", 1e-6)
            return nn.ModuleList([PredictionLayer(self.model, width, eps) for _ in range(self.depth)])

    def inputs(self, batch: TokenBatch) -> tuple[Tensor, TokenContext]:
        """Return token ids, int64 (rows, length), and a context with a request for their embeddings."""
        tokens, context = super().inputs(batch)
        return tokens, attrs.evolve(context, hidden_states=HiddenStates((0,)))

    def loss(self, hidden: Any, head: Head, batch: TokenBatch) -> LossSums:
        """Return the loss sum, the token weight sum, and named sums; hidden are last hidden states and embeddings."""
        state, embedded = hidden[0], hidden[1][0]
        total, weight, sums = super().loss(state, head, batch)
        _, context = super().inputs(batch)
        further: Any = 0.0
        layers: Any = self.module
        for depth, layer in enumerate(layers, 1):
            # Tokens without a target so far ahead in their document get other targets, and no weight.
            ahead = (x.roll(-depth, 1) for x in (embedded, batch.targets, batch.weights, batch.document_ids))
            next_embedded, targets, weights, documents = ahead
            weights = weights * (documents == batch.document_ids)
            weights[:, -depth:] = 0.0
            state = layer(state, next_embedded, context)
            normed = layer.norm(state).to(hidden[0].dtype)
            further = further + head.token_losses(normed, targets.contiguous(), weights)[0].sum() / self.depth
        return total + self.coefficient * further, weight, {**sums, "further_cross_entropy": further.detach()}
