"""LoRA for a head tied to the embedding; the factors change only the head."""

from collections.abc import Mapping

import torch
from torch import Tensor

from drawloom.components.adapters.lora_layers import LoraOptions, LowRankLayer, compute_initial_std, create_factor
from drawloom.components.model.layers import VOCABULARY, ChunkedHead, Embedding
from drawloom.components.parallel.parameter_split import SplitDim
from drawloom.components.parallel.tensor_ranks import TensorParallel
from drawloom.components.weights.adapted import EMBEDDING, HEAD
from drawloom.ports import Fill, Head, HeadLayer, Mapper


class LoraTiedHead(TensorParallel, LowRankLayer, HeadLayer):
    """
    Head with `lora_A` (rank, hidden_size) and `lora_B` (vocab_size, rank) beside the embedding's frozen table.

    The table remains the embedding's parameter. Merged factors make the head differ from the table, so an export
    contains a separate head.
    """

    def __init__(self, embedding: Embedding, options: LoraOptions) -> None:
        super().__init__()
        self._embedding = (embedding,)  # a tuple, because the weight of a submodule would have a second name
        vocab_size, hidden_size = embedding.weight.shape
        self.options = options
        self.vocab_size = vocab_size
        self.lora_A = create_factor(options.rank, hidden_size, like=embedding.weight)
        self.lora_B = create_factor(vocab_size, options.rank, like=embedding.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., hidden_size), in any floating dtype, to (..., vocab_size), in the table's dtype."""
        (embedding,) = self._embedding
        kernels, table = embedding.kernels, embedding.weight
        x = x.to(table.dtype)
        y = kernels.linear(x, table)
        if not self.active:
            return y
        low = kernels.linear(self.options.apply_dropout(x).to(self.lora_A.dtype), self.lora_A)
        return y + (kernels.linear(low, self.lora_B) * self.options.scale).to(y.dtype)

    def head(self) -> Head:
        """Return the layer as a model's head."""
        return ChunkedHead(self, self.vocab_size, self.ranks)

    def split_dims(self) -> Mapping[str, SplitDim]:
        """Split the vocabulary, as the table is split."""
        return {"lora_B": VOCABULARY}

    def initialize_adapter(self, name: str, fill: Fill) -> None:
        """Fill A with random numbers and B with zeros, so the layer begins like the tied head."""
        with torch.no_grad():
            fill(f"{name}.lora_A", self.lora_A, compute_initial_std(self.lora_A.shape[1]))
            self.lora_B.zero_()

    def make_merge_mapper(self, name: str, unmerged_weight_name: str | None = None) -> Mapper:
        """Map to a separate head, table + scale * B A, and the unchanged table."""
        table = f"{EMBEDDING}.weight"
        return self.map_to_merged_weight(name, table, HEAD, table)
