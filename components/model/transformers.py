"""The component `model.transformers`: any causal language model of the library transformers, from its folder."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from drawloom import Problem, UserError, component, wired
from drawloom.components.model.auto import FAMILIES, FolderModel
from drawloom.components.model.decoder.hugging_face import locate_config_json, read_config_json
from drawloom.components.model.decoder.initial_weights import fill_with_initial_weights
from drawloom.components.model.fallback.build import (
    allocate_parameters,
    build_meta_model,
    create_conversion_mapper,
    find_float32_patterns,
    has_transformers_classifier,
    load_transformers_config,
)
from drawloom.components.model.fallback.checks import EXPERT_COUNTS, run_self_check
from drawloom.components.model.fallback.module import (
    Parts,
    SelfCheckError,
    TransformersLM,
    first_config_value,
    mask_layer_number,
)
from drawloom.components.weights.load import open_and_check_folder, persistent_tensors
from drawloom.components.weights.mapper import identity
from drawloom.ports import (
    ConfigJson,
    ForwardFlops,
    Kernels,
    LayerRange,
    Mapper,
    Role,
    TensorSlice,
    Tokenizer,
    parameter_roles,
)

CHOSEN_EXPERTS = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")


@component(impact="incompatible", needs={"transformers": "drawloom[transformers]"})
class Transformers(FolderModel):
    """
    Causal language model of the library transformers, from a folder, for families without a component of their own.

    A small model with the folder's flags is compared with transformers before use; a model that computes something
    else with packed documents or drawloom's layers is refused. Native families are faster, and take part in tensor,
    context and expert parallelism.
    """

    layers_keep_shapes: ClassVar[bool] = True

    kernels: Kernels
    tokenizer: Tokenizer | None = wired(default=None)

    @classmethod
    def constraints(cls, node: Any) -> Iterator[Problem]:
        """Warn about a folder that a faster component reads."""
        with suppress(UserError):  # reported elsewhere
            kind = read_config_json(locate_config_json(node.settings["path"])).get("model_type")
            if kind in FAMILIES:
                native = FAMILIES[kind].__module__.removeprefix("drawloom.components.")
                text = f"{kind} has the component {native}, which is faster and has every mesh dimension"
                yield node.warning("path", text, f'write use = "model.auto", or use = "{native}"')

    @classmethod
    def has_sequence_classifier(cls, node: Any) -> bool:
        with suppress(UserError):  # reported elsewhere
            return has_transformers_classifier(node.settings["path"])
        return True

    @classmethod
    def find_split_faults(cls, node: Any, dimension: str, ranks: int) -> Iterator[str]:
        if dimension != "pipeline":
            split = "partition its layers" if dimension == "tensor" else "split rows"
            yield f"model.transformers can't {split} over ranks"

    def check_model(self) -> None:
        """Raise UserError for a model that fails a check, or a tokenizer with more ids than the vocabulary."""
        _ = self._parts
        if self.weights:
            open_and_check_folder(self.path, self._build_on_meta(), self.hugging_face_mapper().inverse())
        if self.tokenizer is not None and self.tokenizer.vocab_size > self.vocab_size:
            raise UserError(
                f"the tokenizer has {self.tokenizer.vocab_size} ids, but the model's vocabulary only "
                f"{self.vocab_size}; write another tokenizer"
            )

    @cached_property
    def _config(self) -> Any:
        return load_transformers_config(self.path)

    @cached_property
    def _parts(self) -> Parts:
        """The parts that the self-check found. Raises UserError if the model fails."""
        try:
            return run_self_check(self._config)
        except SelfCheckError as error:
            raise self._create_check_error(error.check, error.reason) from error

    def _create_check_error(self, check: str, reason: str) -> UserError:
        """Create the error for a failed self-check."""
        kind = self._config.model_type
        return UserError(
            f"{self.path} has model_type = {kind}, which fails the check {check!r} of model.transformers: {reason}; "
            "take a model of another type, or add its family (docs/families.md)"
        )

    @cached_property
    def _meta_model(self) -> Any:
        """transformers' whole model on the meta device, to look up names and shapes; it must not be changed."""
        return build_meta_model(self._config)

    @property
    def num_hidden_layers(self) -> int:
        return first_config_value(self._config, "num_hidden_layers")  # type: ignore[no-any-return]

    @property
    def vocab_size(self) -> int:
        return first_config_value(self._config, "vocab_size")  # type: ignore[no-any-return]

    @property
    def max_sequence_length(self) -> int | None:
        return first_config_value(self._config, "max_position_embeddings")  # type: ignore[no-any-return]

    @property
    def position_count(self) -> int | None:
        longest = self.max_sequence_length
        parts = [self._meta_model.get_submodule(name) for name in self._parts.before]
        tables = [part for whole in parts for part in whole.modules() if isinstance(part, nn.Embedding)]
        # OPT's table has two more rows; other tables, such as for types of tokens, are smaller.
        return longest if longest and any(longest <= table.num_embeddings <= longest + 2 for table in tables) else None

    def build(self, span: LayerRange) -> nn.Module:
        reason = self._parts.no_stages
        if reason and not (span.embedding and span.head):
            raise self._create_check_error("stages", f"{reason}, so that it has only one pipeline stage")
        module = TransformersLM(build_meta_model(self._config), self._parts, span, self.kernels)
        module.position_count = self.position_count
        if (device := torch.get_default_device()).type != "meta":
            allocate_parameters(module, device)
        return module

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        return [block for part in module.modules() if isinstance(part, TransformersLM) for block in part.blocks]

    def initialize_parameter(
        self, name: str, parameter: Tensor, seed: int, tensor_slice: TensorSlice | None = None
    ) -> None:
        constant = self._parts.constants.get(mask_layer_number(name))
        std = first_config_value(self._config, "initializer_range", "init_std") or 0.02
        role = Role(False, "normal" if constant is None else constant)
        fill_with_initial_weights(
            name, parameter, role, seed=seed, layers=self.num_hidden_layers, std=std, tensor_slice=tensor_slice
        )

    def uncast_parameter_patterns(self) -> Sequence[str]:
        return find_float32_patterns(self._meta_model)

    def forward_flops(self, span: LayerRange | None = None) -> ForwardFlops:
        span = span or LayerRange.of_whole_model(self.num_hidden_layers)
        module = self._build_on_meta(span)
        shapes = dict(module.named_parameters())  # a parameter that modules share is here once
        by_parameter = {
            name: 2.0 * shapes[name].numel() * self._estimate_parameter_uses(name, shapes[name], role)
            for name, role in parameter_roles(module)
            if name in shapes
        }
        per_pair = self._count_pair_flops(range(span.first, span.last))
        return ForwardFlops({name: flops for name, flops in by_parameter.items() if flops}, per_pair)

    def _estimate_parameter_uses(self, name: str, parameter: Tensor, role: Role) -> float:
        """Return how often a token is multiplied by a parameter, a fraction for experts: chosen / all."""
        if name == f"{self._parts.embedding}.weight":
            return float(self._parts.tied)
        experts: int | None = first_config_value(self._config, *EXPERT_COUNTS)
        if ".experts." in name and parameter.ndim > 1 and experts:
            return float(first_config_value(self._config, *CHOSEN_EXPERTS) or experts) / experts
        return role.products

    def _count_pair_flops(self, layers: range) -> dict[int | None, float]:
        """Return FLOPs per query-key pair, summed over these layers, by window (None: full attention)."""
        get = partial(first_config_value, self._config)
        heads = get("num_attention_heads")
        width = get("head_dim") or get("hidden_size") // heads
        both = 2 * width
        if rope_width := get("qk_rope_head_dim"):
            both = (get("qk_nope_head_dim") or 0) + rope_width + (get("v_head_dim") or width)
        flops: dict[int | None, float] = {}
        kinds = get("layer_types") or ["full_attention"] * self.num_hidden_layers
        for kind in kinds[layers.start : layers.stop]:
            window = get("sliding_window") if kind == "sliding_attention" else None
            flops[window] = flops.get(window, 0.0) + 2.0 * heads * both
        return flops

    def hugging_face_config(self) -> ConfigJson:
        # A file may leave the tie out, and adapters of a table depend on it.
        return read_config_json(locate_config_json(self.path)) | {"tie_word_embeddings": self._parts.tied}

    def hugging_face_mapper(self) -> Mapper:
        names = [*persistent_tensors(self._build_on_meta())]
        try:
            return create_conversion_mapper(self._meta_model, names)
        except SelfCheckError as error:
            raise self._create_check_error(error.check, error.reason) from error

    def transformers_mapper(self, folder: Path | None) -> Mapper:
        return identity(*persistent_tensors(self._build_on_meta()))

    def _build_on_meta(self, span: LayerRange | None = None) -> nn.Module:
        """Build drawloom's module for a span, or for the whole model, on the meta device."""
        with torch.device("meta"):
            return self.build(span or LayerRange.of_whole_model(self.num_hidden_layers))
