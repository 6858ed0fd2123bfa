"""The module that a span of the model becomes."""

from collections.abc import Callable

from torch import Tensor, nn

from drawloom.components.model.layers.embedding import Embedding
from drawloom.components.model.layers.linear import Linear
from drawloom.components.model.layers.norm import RMSNorm
from drawloom.components.model.qwen3.block import Block
from drawloom.components.model.qwen3.config import Qwen3Config
from drawloom.components.model.qwen3.rope_scaling import scaling_of
from drawloom.components.ports.model import BatchContext, Kernels, LayerRange
from drawloom.kernels.rope_frequencies import rope_angles


class Qwen3Model(nn.Module):
    """
    A run of layers, named by their numbers in the whole model, with or without either end.

    `intermediate_size` makes the feed-forward network of a layer, from its number.
    A tied head's weight is called `embedding.weight` on every span that has it: where the head stands without the
    embedding, that is a tensor of its own.
    """

    def __init__(
        self, architecture: Qwen3Config, span: LayerRange, kernels: Kernels, feed_forward: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        self.architecture = architecture
        self.span = span
        self.kernels = kernels
        self.scaling = scaling_of(architecture.rope_scaling, architecture.max_position_embeddings)
        blocks = {n: Block(architecture, kernels, feed_forward(n)) for n in range(span.first, span.last)}
        if span.embedding or (span.head and architecture.tie_word_embeddings):
            self.embedding = Embedding(architecture.vocab_size, architecture.hidden_size, kernels)
        self.layers = nn.ModuleDict({str(number): block for number, block in blocks.items()})
        if span.head:
            self.norm = RMSNorm(architecture.hidden_size, architecture.rms_norm_eps, kernels)
        if span.head and not architecture.tie_word_embeddings:
            self.head = Linear(architecture.hidden_size, architecture.vocab_size, kernels)

    def forward(self, inputs: Tensor, shared: BatchContext) -> Tensor:
        hidden = self.embedding(inputs) if self.span.embedding else inputs
        cos, sin = self._angles(shared.positions)
        for block in self.layers.values():
            hidden = block(hidden, cos, sin, shared)
        return self._predict(self.norm(hidden), shared.targets) if self.span.head else hidden

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines that turn queries and keys, float32 (rows, length, head_dim // 2)."""
        return rope_angles(positions, self.architecture.head_dim, self.architecture.rope_theta, self.scaling)

    def _predict(self, hidden: Tensor, targets: Tensor | None) -> Tensor:
        """Losses by token if there are targets, else logits."""
        weight = self.embedding.weight if self.architecture.tie_word_embeddings else self.head.weight
        if targets is None:
            return self.kernels.linear(hidden, weight)
        return self.kernels.linear_cross_entropy(hidden, weight, targets)
