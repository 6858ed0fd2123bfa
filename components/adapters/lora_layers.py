"""
Layers with low-rank adapters: linear layers and heads, embeddings, and experts.

Hu et al. 2021, "LoRA", arXiv 2106.09685, section 4.1: a frozen weight W computes as W + scale * B A. The factors are
parameters of the layer that replaces the frozen one, so that no other parameter changes its name. Names and shapes in
files are those of PEFT.
"""

import math
from collections.abc import Mapping, Sequence

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drawloom.components.model.decoder.experts import Experts
from drawloom.components.model.layers import VOCABULARY, ChunkedHead, Embedding, Linear
from drawloom.components.parallel.parameter_split import SplitDim
from drawloom.components.parallel.tensor import ALONE, TensorRanks
from drawloom.components.ports.adapters import AdaptedLayer, Fill, LowRank
from drawloom.components.ports.model import Head
from drawloom.components.ports.slices import ModelParameter
from drawloom.components.ports.weights import Mapper, TensorGroup
from drawloom.components.weights.mapper import parallel
from drawloom.components.weights.mapper_ops import rename

PEFT = "base_model.model."
"""What PEFT's names of tensors begin with, before transformers' name of the module."""


@attrs.frozen
class LoraForm:
    """Rank of the factors, what their product is multiplied by, dropout of their inputs, and whether DoRA is used."""

    rank: int
    scale: float
    dropout: float = 0.0
    dora: bool = False

    def low_rank(self, target: str, fused: bool = False) -> LowRank:
        """The entry of a module, or with `fused` of a parameter, in a configuration."""
        return LowRank(target, self.rank, self.scale, self.dropout, self.dora, fused)

    def dropped(self, x: Tensor) -> Tensor:
        """Inputs of any shape after dropout, which only passes with gradients have: evaluation and sampling don't."""
        return F.dropout(x, self.dropout) if self.dropout and torch.is_grad_enabled() else x


def factor(*shape: int, like: Tensor) -> nn.Parameter:
    """An empty factor of this shape, of the dtype of a weight, (...), and on its device."""
    return nn.Parameter(torch.empty(shape, dtype=like.dtype, device=like.device))


def initial_std(inputs: int) -> float:
    """That of PEFT's kaiming_uniform_(a=sqrt(5)), which is uniform up to 1 / sqrt(inputs)."""
    return 1 / math.sqrt(3 * inputs)


class LoraLinear(Linear, AdaptedLayer):
    """
    A linear layer with `lora_A` (rank, inputs) and `lora_B` (outputs, rank).

    With DoRA also `lora_magnitude` (outputs,): the norms of the rows of W + scale * B A are these, and B A changes
    their directions only (Liu et al. 2024, "DoRA", arXiv 2402.09353, section 4).
    """

    def __init__(self, base: Linear, form: LoraForm) -> None:
        outputs, inputs = base.weight.shape
        super().__init__(
            inputs,
            outputs,
            base.kernels,
            bias=base.bias is not None,
            style=base.style,
            unit=base.unit,
            uneven=base.uneven,
        )
        self.weight, self.bias = base.weight, base.bias
        self.form = form
        self.lora_A = factor(form.rank, inputs, like=base.weight)
        self.lora_B = factor(outputs, form.rank, like=base.weight)
        if form.dora:
            self.lora_magnitude = factor(outputs, like=base.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs), of any floating dtype, to (..., outputs), in the weight's dtype."""
        x = x.to(self.weight.dtype)
        y = super().forward(x)
        if not self.active:
            return y
        dropped = self.form.dropped(x)
        low = self.kernels.linear(dropped.to(self.lora_A.dtype), self.lora_A)
        change = self.kernels.linear(low, self.lora_B) * self.form.scale
        if self.form.dora:
            scale = dora_scale(
                self.weight, self.lora_A, self.lora_B, self.form.scale, self.lora_magnitude, self._ranks_of_rows
            )
            plain = self.kernels.linear(dropped, self.weight) if dropped is not x or self.bias is not None else y
            change = (scale - 1).to(y.dtype) * plain + scale.to(y.dtype) * change
        return y + change.to(y.dtype)

    def head(self) -> Head:
        """The layer as the head of a model."""
        return ChunkedHead(self, self.out_features, self.ranks)

    @property
    def _ranks_of_rows(self) -> TensorRanks:
        """The ranks that share each row of the weight."""
        return self.ranks if self.style == "rowwise" else ALONE

    def split_dims(self) -> Mapping[str, SplitDim]:
        """Of the factors the one that has the split dimension of the weight."""
        dims = super().split_dims()
        if self.style == "rowwise":
            return {**dims, "lora_A": dims["weight"]}
        return {**dims, **dict.fromkeys(self.adapter_names[1:], dims["weight"])}

    @property
    def adapter_names(self) -> list[str]:
        """Both factors, and the magnitude of DoRA."""
        return ["lora_A", "lora_B", *(["lora_magnitude"] if self.form.dora else [])]

    def fill_adapter(self, name: str, fill: Fill) -> None:
        """Random numbers for A and zeros for B, so that the layer begins as the frozen one."""
        with torch.no_grad():
            fill(f"{name}.lora_A", self.lora_A, initial_std(self.in_features))
            self.lora_B.zero_()
            if self.form.dora:
                weight = ModelParameter(self.weight).whole()
                # In float64, so that ranks that share rows round the sum to the same number as one that has all.
                squares = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float64).square()
                self.lora_magnitude.copy_(self._ranks_of_rows.sum(squares).sqrt())

    def merge_mapper(self, name: str, base: str | None = None) -> Mapper:
        """W + scale * B A, with DoRA its rows in the magnitudes' lengths."""
        weight = f"{name}.weight"

        def merge(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            w, a, b, *magnitude = [tensor.to(wide(tensors[0])) for tensor in tensors]
            merged = w + self.form.scale * (b @ a)
            if magnitude:
                merged = merged * (magnitude[0] / torch.linalg.vector_norm(merged, dim=1))[:, None]
            return [merged.to(tensors[0].dtype), *([tensors[0]] if base else [])]

        inputs = (weight, *(f"{name}.{leaf}" for leaf in self.adapter_names))
        return Mapper((TensorGroup(inputs, (weight, *([base] if base else [])), merge),))

    def peft_mapper(self, name: str) -> Mapper:
        """The factors as weights of two linear layers."""
        theirs = {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight", "lora_magnitude": "lora_magnitude_vector"}
        return rename({f"{name}.{leaf}": f"{PEFT}{name}.{theirs[leaf]}" for leaf in self.adapter_names})

    def low_ranks(self, name: str) -> list[LowRank]:
        """One pair of factors."""
        return [self.form.low_rank(name)]


class LoraEmbedding(Embedding, AdaptedLayer):
    """
    An embedding with `lora_A` (vocab_size, rank), which is looked up, and `lora_B` (hidden_size, rank).

    A head that is tied to the embedding uses the frozen table.
    """

    def __init__(self, base: Embedding, form: LoraForm) -> None:
        vocab_size, hidden_size = base.weight.shape
        super().__init__(vocab_size, hidden_size, base.kernels)
        self.weight = base.weight
        self.form = form
        self.lora_A = factor(vocab_size, form.rank, like=base.weight)
        self.lora_B = factor(hidden_size, form.rank, like=base.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids, int64 (...), to vectors (..., hidden_size) of the weight's dtype."""
        vectors = super().forward(tokens)
        if not self.active:
            return vectors
        change = self.kernels.linear(self.look_up(tokens, self.lora_A), self.lora_B)
        return vectors + (change * self.form.scale).to(vectors.dtype)

    def split_dims(self) -> Mapping[str, SplitDim]:
        """The vocabulary."""
        return {"weight": VOCABULARY, "lora_A": VOCABULARY}

    @property
    def adapter_names(self) -> list[str]:
        """Both factors."""
        return ["lora_A", "lora_B"]

    def fill_adapter(self, name: str, fill: Fill) -> None:
        """Zeros for A and random numbers for B, as PEFT has it for embeddings."""
        with torch.no_grad():
            self.lora_A.zero_()
            fill(f"{name}.lora_B", self.lora_B, 1.0)

    def merge_mapper(self, name: str, base: str | None = None) -> Mapper:
        """The table + scale * A Bᵀ."""
        weight = f"{name}.weight"

        def merge(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            w, a, b = [tensor.to(wide(tensors[0])) for tensor in tensors]
            merged = w + self.form.scale * (a @ b.T)
            return [merged.to(tensors[0].dtype), *([tensors[0]] if base else [])]

        inputs = (weight, f"{name}.lora_A", f"{name}.lora_B")
        return Mapper((TensorGroup(inputs, (weight, *([base] if base else [])), merge),))

    def peft_mapper(self, name: str) -> Mapper:
        """PEFT's A is (rank, vocab_size)."""

        def swap(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            return [tensors[0].T.contiguous()]

        start = f"{PEFT}{name}.lora_embedding_"
        first = TensorGroup((f"{name}.lora_A",), (f"{start}A",), swap, swap)
        return parallel(Mapper((first,)), rename({f"{name}.lora_B": f"{start}B"}))

    def low_ranks(self, name: str) -> list[LowRank]:
        """One pair of factors."""
        return [self.form.low_rank(name)]


FUSED = ("gate_up_proj", "down_proj")
"""The parameters of experts, in PEFT's order: each has (experts, outputs, inputs)."""


class LoraExperts(Experts, AdaptedLayer):
    """
    Experts with factors for one or both of their parameters, for each expert a pair.

    For `down_proj` they are `down_proj_lora_A` (experts, rank, inputs) and `down_proj_lora_B` (experts, outputs, rank).
    """

    def __init__(self, base: Experts, form: LoraForm, adapted: Sequence[str]) -> None:
        nn.Module.__init__(self)
        self.num_experts, self.kernels = base.num_experts, base.kernels
        self.form = form
        self.adapted = [name for name in FUSED if name in adapted]
        for name in FUSED:
            weight = getattr(base, name)
            self.register_parameter(name, weight)
            if name in adapted:
                experts, outputs, inputs = weight.shape
                self.register_parameter(f"{name}_lora_A", factor(experts, form.rank, inputs, like=weight))
                self.register_parameter(f"{name}_lora_B", factor(experts, outputs, form.rank, like=weight))

    def project(self, name: str, rows: Tensor, ends: Tensor) -> Tensor:
        """Rows (rows, inputs), sorted by expert, by one of the parameters: (rows, outputs)."""
        y = super().project(name, rows, ends)
        if name not in self.adapted or not self.active:
            return y
        first, second = getattr(self, f"{name}_lora_A"), getattr(self, f"{name}_lora_B")
        low = self.kernels.grouped_gemm(rows.to(first.dtype), first, ends, transposed=True)
        change = self.kernels.grouped_gemm(low, second, ends, transposed=True)
        return y + (change * self.form.scale).to(y.dtype)

    @property
    def adapter_names(self) -> list[str]:
        """The factors of each adapted parameter."""
        return [f"{name}_lora_{factor}" for name in self.adapted for factor in "AB"]

    def fill_adapter(self, name: str, fill: Fill) -> None:
        """Random numbers for A and zeros for B."""
        with torch.no_grad():
            for each in self.adapted:
                first = getattr(self, f"{each}_lora_A")
                fill(f"{name}.{each}_lora_A", first, initial_std(first.shape[2]))
                getattr(self, f"{each}_lora_B").zero_()

    def merge_mapper(self, name: str, base: str | None = None) -> Mapper:
        """W + scale * B A for each expert."""

        def merge(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            w, a, b = [tensor.to(wide(tensors[0])) for tensor in tensors]
            return [torch.baddbmm(w, b, a, alpha=self.form.scale).to(tensors[0].dtype)]

        groups = []
        for each in self.adapted:
            weight = f"{name}.{each}"
            groups.append(TensorGroup((weight, f"{weight}_lora_A", f"{weight}_lora_B"), (weight,), merge))
        return Mapper(tuple(groups))

    def peft_mapper(self, name: str) -> Mapper:
        """
        PEFT wraps the module once for each parameter, so that the first one's factors are those of `base_layer`.

        Its A is (experts * rank, inputs), expert by expert; its B (outputs, rank * experts), rank by rank.
        """

        def first(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            return [tensors[0].flatten(0, 1)]

        def second(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            return [tensors[0].permute(1, 2, 0).flatten(1)]

        groups = []
        for place, each in enumerate(self.adapted):
            start = f"{PEFT}{name}.{'base_layer.' * (len(self.adapted) - 1 - place)}"
            groups.append(TensorGroup((f"{name}.{each}_lora_A",), (f"{start}lora_A.weight",), first))
            groups.append(TensorGroup((f"{name}.{each}_lora_B",), (f"{start}lora_B.weight",), second))
        return Mapper(tuple(groups))

    def low_ranks(self, name: str) -> list[LowRank]:
        """A pair for each adapted parameter."""
        return [self.form.low_rank(f"{name}.{each}", fused=True) for each in self.adapted]


def wide(tensor: Tensor) -> torch.dtype:
    """The dtype to merge a tensor of any shape in: at least float32, as a change is small beside the weight."""
    return torch.promote_types(tensor.dtype, torch.float32)


def dora_scale(
    weight: Tensor, first: Tensor, second: Tensor, scale: float, magnitude: Tensor, ranks: TensorRanks = ALONE
) -> Tensor:
    """
    magnitude / |row of W + scale * B A| for each row, at least float32 (outputs,).

    weight (outputs, inputs), first = A (rank, inputs), second = B (outputs, rank); several `ranks` share the inputs. It
    is differentiable in the magnitude alone: the norm is a constant for the gradient, as in section 4.3 of the paper.
    """
    with torch.no_grad():
        # By |w|² + 2 scale w·(bA) + scale² |bA|², which needs no second matrix of the weight's size.
        dtype = torch.promote_types(weight.dtype, torch.float32)
        square = torch.linalg.vector_norm(weight, dim=1, dtype=dtype).square()
        a, b = first.to(dtype), second.to(dtype)
        cross = ((weight @ first.to(weight.dtype).T).to(dtype) * b).sum(1)
        square = square + 2 * scale * cross + scale**2 * ((b @ (a @ a.T)) * b).sum(1)
        norm = ranks.sum(square).clamp_min(0).sqrt()
    factor: Tensor = magnitude.to(dtype) / norm
    return factor
