"""
Layers with low-rank adapters: linear layers and heads, embeddings, and experts.

Hu et al. 2021, "LoRA", arXiv 2106.09685, section 4.1: a frozen weight W computes as W + scale * B A. The factors are
parameters in the layer that replaces the frozen one, so all other parameters keep their names. Names and shapes in
files are PEFT's.

Factors of a head tied to the embedding change only the head.
"""

import math
from collections.abc import Mapping, Sequence

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drawloom.components.model.decoder.experts import Experts
from drawloom.components.model.layers import VOCABULARY, ChunkedHead, Embedding, Linear
from drawloom.components.parallel.tensor_ranks import ALONE, SplitDim, TensorParallel, TensorRanks
from drawloom.components.weights.adapted import EMBEDDING, HEAD
from drawloom.components.weights.mapper import TensorFunction, convert_one, parallel, rename
from drawloom.ports import AdaptedLayer, Fill, Head, HeadLayer, LowRank, Mapper, ModelParameter, TensorGroup

PEFT = "base_model.model."
"""Prefix of PEFT's tensor names, before the name of the module in transformers."""

PEFT_NAMES = {"lora_magnitude": "lora_magnitude_vector"}
"""Names of parameters in PEFT that do not end with `.weight`."""


@attrs.frozen
class LoraOptions:
    """Options for a layer's factors: rank, the product's scale, the inputs' dropout, and DoRA."""

    rank: int
    scale: float
    dropout: float = 0.0
    dora: bool = False

    def make_low_rank(self, target: str, fused: bool = False) -> LowRank:
        """Describe the factors of the module `target`, or if `fused` of the parameter `target`."""
        return LowRank(target, self.rank, self.scale, self.dropout, self.dora, fused)

    def apply_dropout(self, x: Tensor) -> Tensor:
        """Apply dropout to inputs (any shape) in passes with gradients, but not in evaluation and sampling."""
        return F.dropout(x, self.dropout) if self.dropout and torch.is_grad_enabled() else x


def create_factor(*shape: int, like: Tensor) -> nn.Parameter:
    """Return an uninitialized parameter with a shape, and with the dtype and device of `like`."""
    return nn.Parameter(torch.empty(shape, dtype=like.dtype, device=like.device))


def compute_initial_std(inputs: int) -> float:
    """Return the standard deviation in PEFT's kaiming_uniform_(a=sqrt(5)): uniform up to 1 / sqrt(inputs)."""
    return 1 / math.sqrt(3 * inputs)


class LowRankLayer(AdaptedLayer):
    """Layer with the factors `lora_A` and `lora_B` of one weight's change."""

    options: LoraOptions

    @property
    def adapter_parameter_names(self) -> list[str]:
        return ["lora_A", "lora_B"]

    def merge_factors(self, weight: Tensor, a: Tensor, b: Tensor, *others: Tensor) -> Tensor:
        """Return W + scale * B A."""
        return weight + self.options.scale * (b @ a)

    def make_merge_mapper(self, name: str, unmerged_weight_name: str | None = None) -> Mapper:
        return self.map_to_merged_weight(name, f"{name}.weight", f"{name}.weight", unmerged_weight_name)

    def map_to_merged_weight(self, name: str, weight: str, merged: str, unmerged: str | None) -> Mapper:
        """Map the tensor `weight` and this layer's factors to `merged` and, if there is a name, to `unmerged`."""

        def merge(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            wide = [tensor.to(choose_merge_dtype(tensors[0])) for tensor in tensors]
            return [self.merge_factors(*wide).to(tensors[0].dtype), *([tensors[0]] if unmerged else [])]

        inputs = (weight, *(f"{name}.{leaf}" for leaf in self.adapter_parameter_names))
        return Mapper((TensorGroup(inputs, (merged, *([unmerged] if unmerged else [])), merge),))

    def make_mapper_to_peft(self, name: str) -> Mapper:
        names = {leaf: PEFT_NAMES.get(leaf, f"{leaf}.weight") for leaf in self.adapter_parameter_names}
        return rename({f"{name}.{leaf}": f"{PEFT}{name}.{peft_name}" for leaf, peft_name in names.items()})

    def list_low_rank_pairs(self, name: str) -> list[LowRank]:
        return [self.options.make_low_rank(name)]


class LoraLinear(Linear, LowRankLayer):
    """
    Linear layer with `lora_A` (rank, inputs) and `lora_B` (outputs, rank).

    With DoRA, `lora_magnitude` (outputs,) are the row norms of W + scale * B A, so B A changes only the rows'
    directions (Liu et al. 2024, "DoRA", arXiv 2402.09353, section 4).
    """

    def __init__(self, base: Linear, options: LoraOptions) -> None:
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
        self.joined_name = base.joined_name
        self.options = options
        self.lora_A = create_factor(options.rank, inputs, like=base.weight)
        self.lora_B = create_factor(outputs, options.rank, like=base.weight)
        if options.dora:
            self.lora_magnitude = create_factor(outputs, like=base.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., inputs), in any floating dtype, to (..., outputs), in the weight's dtype."""
        x = x.to(self.weight.dtype)
        y = super().forward(x)
        if not self.active:
            return y
        dropped = self.options.apply_dropout(x)
        low = self.kernels.linear(dropped.to(self.lora_A.dtype), self.lora_A)
        change = self.kernels.linear(low * self.options.scale, self.lora_B)  # scaling `low` moves the fewest bytes
        if self.options.dora:
            # y has the bias, and inputs without dropout.
            base_product = self.multiply_by_weight(dropped) if dropped is not x or self.bias is not None else y
            change = self._apply_dora(base_product, change, y.dtype)
        return y + change.to(y.dtype)

    def _apply_dora(self, base_product: Tensor, change: Tensor, dtype: torch.dtype) -> Tensor:
        """
        Return scale * (W x + change) - W x, given `base_product` W x; the scale is magnitude / row norm, in `dtype`.
        """
        scale = compute_dora_scale(
            self.decode_weight(self.weight),
            self.lora_A,
            self.lora_B,
            self.options.scale,
            self.lora_magnitude,
            self._ranks_splitting_each_weight_row,
        )
        return (scale - 1).to(dtype) * base_product + scale.to(dtype) * change

    def head(self) -> Head:
        """Return the layer as a model's head."""
        return ChunkedHead(self, self.out_features, self.ranks)

    @property
    def _ranks_splitting_each_weight_row(self) -> TensorRanks:
        """Ranks that partition every weight row, an output's weights; only this rank unless the layer is rowwise."""
        return self.ranks if self.style == "rowwise" else ALONE

    def split_dims(self) -> Mapping[str, SplitDim]:
        """Split the factor with the weight's split dimension."""
        dims = super().split_dims()
        if not dims:
            return {}
        if self.style == "rowwise":
            return {**dims, "lora_A": dims["weight"]}
        return {**dims, **dict.fromkeys(self.adapter_parameter_names[1:], dims["weight"])}

    @property
    def adapter_parameter_names(self) -> list[str]:
        return [*super().adapter_parameter_names, *(["lora_magnitude"] if self.options.dora else [])]

    def initialize_adapter(self, name: str, fill: Fill) -> None:
        """Fill A with random numbers and B with zeros, so the layer begins like the frozen layer."""
        with torch.no_grad():
            fill(f"{name}.lora_A", self.lora_A, compute_initial_std(self.in_features))
            self.lora_B.zero_()
            if self.options.dora:
                weight = self.decode_weight(ModelParameter(self.weight).gather_whole())
                # In float64, so that the sum over ranks rounds to the same number as the sum on one rank.
                squares = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float64).square()
                self.lora_magnitude.copy_(self._ranks_splitting_each_weight_row.all_reduce(squares).sqrt())

    def merge_factors(self, weight: Tensor, a: Tensor, b: Tensor, *magnitude: Tensor) -> Tensor:
        """Return W + scale * B A, with DoRA scaled to the rows' magnitudes."""
        merged = super().merge_factors(weight, a, b)
        if magnitude:
            merged = merged * (magnitude[0] / torch.linalg.vector_norm(merged, dim=1))[:, None]
        return merged


class LoraEmbedding(Embedding, LowRankLayer):
    """
    Embedding with `lora_A` (vocab_size, rank), a second table, and `lora_B` (hidden_size, rank).

    A head tied to the embedding uses the frozen table.
    """

    def __init__(self, base: Embedding, options: LoraOptions) -> None:
        vocab_size, hidden_size = base.weight.shape
        super().__init__(vocab_size, hidden_size, base.kernels)
        self.weight = base.weight
        self.options = options
        self.lora_A = create_factor(vocab_size, options.rank, like=base.weight)
        self.lora_B = create_factor(hidden_size, options.rank, like=base.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids, int64 (...), to vectors (..., hidden_size) in the weight's dtype."""
        vectors = super().forward(tokens)
        if not self.active:
            return vectors
        change = self.kernels.linear(self.look_up_rows(tokens, self.lora_A) * self.options.scale, self.lora_B)
        return vectors + change.to(vectors.dtype)

    def split_dims(self) -> Mapping[str, SplitDim]:
        """Split the vocabulary."""
        return {"weight": VOCABULARY, "lora_A": VOCABULARY}

    def initialize_adapter(self, name: str, fill: Fill) -> None:
        """Fill A with zeros and B with standard normal numbers, as PEFT does."""
        with torch.no_grad():
            self.lora_A.zero_()
            fill(f"{name}.lora_B", self.lora_B, 1.0)

    def merge_factors(self, weight: Tensor, a: Tensor, b: Tensor, *others: Tensor) -> Tensor:
        """Return the table + scale * A Bᵀ."""
        return weight + self.options.scale * (a @ b.T)

    def make_mapper_to_peft(self, name: str) -> Mapper:
        """Transpose A, because it is (rank, vocab_size) in PEFT."""

        def transpose_factor_a(factor: Tensor) -> Tensor:
            return factor.T.contiguous()

        start = f"{PEFT}{name}.lora_embedding_"
        first = convert_one(f"{name}.lora_A", transpose_factor_a, transpose_factor_a, f"{start}A")
        return parallel(first, rename({f"{name}.lora_B": f"{start}B"}))


class LoraExperts(Experts, AdaptedLayer):
    """
    Experts with a pair of factors per expert for one or both parameters; products are in the compute dtype.

    `down_proj` has the factors `down_proj_lora_A` (experts, rank, inputs) and `down_proj_lora_B` (experts, outputs,
    rank).
    """

    def __init__(self, base: Experts, options: LoraOptions, adapted: Sequence[str]) -> None:
        nn.Module.__init__(self)
        self.num_experts, self.kernels, self.spec = base.num_experts, base.kernels, base.spec
        for name in self.matrices if base.spec.expert_biases else ():
            self.register_parameter(f"{name}_bias", getattr(base, f"{name}_bias"))
        self.options = options
        self.adapted = [name for name in self.matrices if name in adapted]  # in PEFT's order
        for name in self.matrices:
            weight = getattr(base, name)
            self.register_parameter(name, weight)
            if name in adapted:
                experts, outputs, inputs = weight.shape
                self.register_parameter(f"{name}_lora_A", create_factor(experts, options.rank, inputs, like=weight))
                self.register_parameter(f"{name}_lora_B", create_factor(experts, outputs, options.rank, like=weight))

    def project(self, name: str, rows: Tensor, ends: Tensor) -> Tensor:
        """Multiply rows (rows, inputs), sorted by expert, by one of the parameters: (rows, outputs)."""
        y = super().project(name, rows, ends)
        if name not in self.adapted or not self.active:
            return y
        first, second = getattr(self, f"{name}_lora_A"), getattr(self, f"{name}_lora_B")
        low = self.kernels.grouped_gemm(rows.to(first.dtype), first, ends, transposed=True)
        change = self.kernels.grouped_gemm(low * self.options.scale, second, ends, transposed=True)
        return y + change.to(y.dtype)

    @property
    def adapter_parameter_names(self) -> list[str]:
        return [f"{name}_lora_{factor}" for name in self.adapted for factor in "AB"]

    def initialize_adapter(self, name: str, fill: Fill) -> None:
        """Fill A with random numbers and B with zeros."""
        with torch.no_grad():
            for leaf in self.adapted:
                first = getattr(self, f"{leaf}_lora_A")
                fill(f"{name}.{leaf}_lora_A", first, compute_initial_std(first.shape[2]))
                getattr(self, f"{leaf}_lora_B").zero_()

    def make_merge_mapper(self, name: str, unmerged_weight_name: str | None = None) -> Mapper:
        """Map to W + scale * B A for every expert."""

        def merge(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            w, a, b = [tensor.to(choose_merge_dtype(tensors[0])) for tensor in tensors]
            return [torch.baddbmm(w, b, a, alpha=self.options.scale).to(tensors[0].dtype)]

        groups = []
        for leaf in self.adapted:
            weight = f"{name}.{leaf}"
            groups.append(TensorGroup((weight, f"{weight}_lora_A", f"{weight}_lora_B"), (weight,), merge))
        return Mapper(tuple(groups))

    def make_mapper_to_peft(self, name: str) -> Mapper:
        """
        Reshape the factors for PEFT: A is (experts * rank, inputs), expert by expert, B (outputs, rank * experts).

        PEFT wraps the module once per parameter, so the first parameter's factors belong to `base_layer`.
        """
        conversions: dict[str, tuple[TensorFunction, TensorFunction]] = {
            "A": (
                lambda factor: factor.flatten(0, 1),
                lambda flat: flat.reshape(self.num_experts, -1, flat.shape[1]),
            ),
            "B": (
                lambda factor: factor.permute(1, 2, 0).flatten(1),
                lambda flat: flat.reshape(len(flat), -1, self.num_experts).permute(2, 0, 1),
            ),
        }
        mappers = []
        for index, leaf in enumerate(self.adapted):
            start = f"{PEFT}{name}.{'base_layer.' * (len(self.adapted) - 1 - index)}"
            for factor, (flatten, unflatten) in conversions.items():
                target = f"{start}lora_{factor}.weight"
                mappers.append(convert_one(f"{name}.{leaf}_lora_{factor}", flatten, unflatten, target))
        return parallel(*mappers)

    def list_low_rank_pairs(self, name: str) -> list[LowRank]:
        return [self.options.make_low_rank(f"{name}.{leaf}", fused=True) for leaf in self.adapted]


def choose_merge_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype to merge a tensor in: at least float32, because changes are small relative to the weight."""
    return torch.promote_types(tensor.dtype, torch.float32)


def compute_dora_scale(
    weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float, magnitude: Tensor, ranks: TensorRanks = ALONE
) -> Tensor:
    """
    Return magnitude / |row of W + scale * B A| for every row, at least float32 (outputs,).

    weight (outputs, inputs), lora_a (rank, inputs), lora_b (outputs, rank); several `ranks` split the inputs.
    Only the magnitude has a gradient: the norm counts as a constant, as in the paper's section 4.3.
    """
    with torch.no_grad():
        # |w|² + 2 scale w·(bA) + scale² |bA|² needs no second matrix of the weight's size.
        dtype = choose_merge_dtype(weight)
        square = torch.linalg.vector_norm(weight, dim=1, dtype=dtype).square()
        a, b = lora_a.to(dtype), lora_b.to(dtype)
        cross = ((weight @ lora_a.to(weight.dtype).T).to(dtype) * b).sum(1)
        square = square + 2 * scale * cross + scale**2 * ((b @ (a @ a.T)) * b).sum(1)
        norm = ranks.all_reduce(square).clamp_min(0).sqrt()
    factor: Tensor = magnitude.to(dtype) / norm
    return factor


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
