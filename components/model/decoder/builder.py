"""The settings that all families share, the modules that they build, and initial weights."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.distributed.rng import derive_seed, fill_normal
from drawloom.components.model.decoder.config import DecoderConfig, MoeConfig, num_experts, size, tensor_faults
from drawloom.components.model.decoder.hugging_face import Family, config_of, config_path, mapper_of, read_config
from drawloom.components.model.decoder.layer import Block, SwiGLU
from drawloom.components.model.decoder.model import CausalLM
from drawloom.components.model.decoder.rope import RopeScaling
from drawloom.components.model.decoder.settings import choose_architecture, faults
from drawloom.components.model.split_vocabulary import (
    NewTokens,
    Split,
    count_new_tokens,
    fault_of_new_tokens,
    join_mapper,
    part,
    split_sizes,
)
from drawloom.components.ports.corpus import Tokenizer
from drawloom.components.ports.flops import ForwardFlops
from drawloom.components.ports.model import Kernels, LayerRange
from drawloom.components.ports.slices import TensorSlice
from drawloom.components.ports.weights import Mapper
from drawloom.components.weights.load import persistent_tensors
from drawloom.components.weights.mapper import sequential
from drawloom.graph import Problem, UserError, above, inherited, setting, wired

RESIDUAL_OUTPUTS = (".self_attn.o_proj.weight", ".mlp.down_proj.weight", ".mlp.experts.down_proj")

NEW_TOKENS_ARE_WHOLE = "the rows of new tokens can't be shared"


def fill_with_initial_weights(
    name: str, parameter: Tensor, *, seed: int, layers: int, std: float, part_of: TensorSlice | None = None
) -> None:
    """
    Fill a parameter of any shape and floating-point dtype, or the slice `part_of` of one, in place.

    Biases get 0, other vectors, which are the weights of norms, 1, and matrices normal numbers of standard deviation
    `std`. The 2 * layers matrices whose outputs are added to the residual stream get it divided by sqrt(2 * layers), so
    that the
    stream does not grow with depth (Radford et al. 2019, GPT-2, section 2.3). Numbers depend on the seed, the name and
    the element's index only; they are drawn in float32 and rounded to the dtype.
    """
    if parameter.ndim < 2:
        with torch.no_grad():
            parameter.fill_(0.0 if name.endswith(".bias") else 1.0)
        return
    # Each layer adds two outputs to the stream: attention's and the feed-forward network's.
    scale = std / math.sqrt(2 * layers) if name.endswith(RESIDUAL_OUTPUTS) else std
    part = part_of or TensorSlice.whole(tuple(parameter.shape))
    fill_normal(parameter, derive_seed(seed, "initial weights", name), scale, part.shape, part.offsets)


@inherited
class DecoderBuilder:
    """A decoder of sizes given by settings or by a Hugging Face `config.json`; its layers are dense."""

    family: ClassVar[Family]
    layers_keep_shapes: ClassVar[bool] = True

    kernels: Kernels
    tokenizer: Tokenizer | None = wired(default=None)
    config: Path | None = setting(
        default=None, doc="a Hugging Face config.json, or its folder; what follows is set over it"
    )
    _num_hidden_layers: int | None = setting(
        default=None, alias="num_hidden_layers", check=size("num_hidden_layers"), doc="how many layers"
    )
    hidden_size: int | None = setting(default=None, check=size("hidden_size"), doc="channels of the hidden states")
    num_attention_heads: int | None = setting(default=None, check=size("num_attention_heads"), doc="query heads")
    num_key_value_heads: int | None = setting(
        default=None, check=size("num_key_value_heads"), doc="key and value heads; heads if left out"
    )
    head_dim: int | None = setting(
        default=None, check=size("head_dim"), doc="channels of a head; width / heads if left out"
    )
    intermediate_size: int | None = setting(
        default=None, check=size("intermediate_size"), doc="channels inside the feed-forward network"
    )
    _vocab_size: int | None = setting(
        default=None, alias="vocab_size", check=size("vocab_size"), doc="token ids; the tokenizer's if left out"
    )
    vocabulary_multiple: int = setting(
        default=1, check=size("vocab_size"), doc="the tokenizer's vocabulary is rounded up to a multiple of this"
    )
    new_tokens: NewTokens = setting(
        default=0,
        check=fault_of_new_tokens,
        doc="how many of the tokenizer's last ids have rows of their own in embedding and head, called new_tokens, "
        "which a folder need not have; or, for several such splits, a table of names and numbers in the order of ids",
    )
    tie_word_embeddings: bool | None = setting(default=None, doc="whether the head is the embedding; false if left out")
    max_position_embeddings: int | None = setting(
        default=None,
        check=size("max_position_embeddings"),
        impact="safe",
        doc="longest text that an export claims; the family's if left out",
    )
    rope_theta: float | None = setting(
        default=None,
        check=above(1),
        impact="changes_training",
        doc="base of rotary positions; the family's if left out",
    )
    rope_scaling: RopeScaling | None = setting(
        default=None, impact="changes_training", doc="how rotary positions are scaled for longer texts; not if left out"
    )
    rope_parameters: RopeScaling | None = setting(
        default=None,
        impact="changes_training",
        doc="transformers 5's form of rope_theta and rope_scaling, instead of both",
    )
    rms_norm_eps: float | None = setting(
        default=None,
        check=above(0),
        impact="changes_training",
        doc="added to mean squares in norms; the family's if left out",
    )
    initializer_range: float | None = setting(
        default=None,
        check=above(0),
        impact="changes_training",
        doc="standard deviation of initial weights; 0.02 if left out",
    )

    @classmethod
    def constraints(cls, node: Any) -> Iterator[Problem]:
        """Settings that contradict one another, or lack something."""
        for fault in faults(cls.family, node.settings, node.neighbour("tokenizer") is not None):
            yield node.problem(fault.key, fault.why, fault.instead)

    @classmethod
    def tensor_faults(cls, node: Any, ranks: int) -> Iterator[str]:
        """Why this number of ranks along `tensor` can't share the model; nothing if they can."""
        if node.settings["new_tokens"]:
            yield NEW_TOKENS_ARE_WHOLE
        config = node.settings["config"]
        with suppress(UserError):  # a problem of its own
            sizes = node.settings if config is None else attrs.asdict(read_config(cls.family, config), recurse=False)
            yield from tensor_faults(sizes, ranks)

    @classmethod
    def context_faults(cls, node: Any) -> Iterator[str]:
        """Yield the reasons why the model needs whole rows."""
        rope = node.settings["rope_parameters"] or node.settings["rope_scaling"]
        if rope and rope.rope_type == "dynamic":
            yield "dynamic positions depend on the length of whole rows"

    @classmethod
    def expert_count(cls, node: Any) -> int:
        """The experts of a layer; 0 if the model has none."""
        config = node.settings["config"]
        if (given := node.settings.get("num_experts")) or config is None:
            return given or 0
        with suppress(UserError):  # a problem of its own
            return num_experts(read_config(cls.family, config))
        return 0

    @classmethod
    def module_of(cls, node: Any) -> nn.Module | None:
        """Return the whole model by a node's settings, on the meta device; None if the settings are invalid."""
        # Only shapes depend on the vocabulary, which an open tokenizer knows, and only a forward pass takes kernels.
        ids = {} if node.settings["config"] or node.settings["vocab_size"] else {"vocab_size": 1}
        kernels: Any = None
        with suppress(UserError):  # a problem of its own
            return cls(kernels=kernels, **{**node.settings, **ids}).whole_module()
        return None

    @classmethod
    def resume_impact(cls, node: Any, key: str) -> str | None:
        """max_position_embeddings is only exported, unless dynamic positions depend on it."""
        rope = node.settings["rope_parameters"] or node.settings["rope_scaling"]
        return "changes_training" if key == "max_position_embeddings" and rope and rope.rope_type == "dynamic" else None

    def check_machine(self) -> None:
        """Raise UserError if the config can't be read or built, or the tokenizer has more ids than the vocabulary."""
        _ = self.architecture

    @cached_property
    def architecture(self) -> DecoderConfig:
        """All sizes. Computed on first use, because the tokenizer reads a file."""
        cls: Any = type(self)
        settings = {field.alias: getattr(self, field.name) for field in attrs.fields(cls)}
        tokens = None if self.tokenizer is None else self.tokenizer.vocab_size
        return choose_architecture(self.family, settings, tokens, count_new_tokens(self.new_tokens))

    @property
    def split(self) -> Split | None:
        """Which ids are new tokens, if there are some: the tokenizer's last, or those after the table's."""
        if not self.new_tokens:
            return None
        rows, count = self.architecture.vocab_size, count_new_tokens(self.new_tokens)
        end = rows + count if self.tokenizer is None else self.tokenizer.vocab_size
        return Split(end - count, split_sizes(self.new_tokens), rows)

    def files_read(self) -> dict[str, list[Path]]:
        """The config.json, if the sizes are in one."""
        if self.config is None:
            return {}
        return {"config": [config_path(self.config)]}

    @property
    def num_hidden_layers(self) -> int:
        return self.architecture.num_hidden_layers

    @property
    def vocab_size(self) -> int:
        return self.architecture.vocab_size if self.split is None else self.split.size

    @property
    def longest_text(self) -> int:
        return self.architecture.longest_text

    def mlp_of(self, number: int) -> nn.Module:
        """The feed-forward network of a layer: hidden states and weights of tokens in, hidden states out."""
        return SwiGLU(self.architecture, self.kernels)

    def build(self, span: LayerRange) -> nn.Module:
        module = CausalLM(self.architecture, span, self.kernels, self.mlp_of)
        return module if self.split is None else part(module, self.split)

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        return [part for part in module.modules() if isinstance(part, Block)]

    def initialise(self, name: str, parameter: Tensor, seed: int, part_of: TensorSlice | None = None) -> None:
        """A function of seed, name and index alone, for parameters of any shape and slices of them."""
        std, layers = self.architecture.initializer_range, self.architecture.num_hidden_layers
        fill_with_initial_weights(name, parameter, seed=seed, layers=layers, std=std, part_of=part_of)

    def forward_flops(self) -> ForwardFlops:
        """Floating-point operations of matrix products, by parameter, and of attention."""
        return forward_flops(self.whole_module(), self.architecture)

    def hugging_face_config(self) -> dict[str, Any]:
        written = attrs.evolve(self.architecture, vocab_size=self.vocab_size)
        return config_of(self.family, written, None if self.tokenizer is None else self.tokenizer.eos_id)

    def hugging_face_mapper(self) -> Mapper:
        names = [*persistent_tensors(self.whole_module())]
        joined = Mapper(()) if self.split is None else join_mapper(names, self.split)
        kept = [name for name in names if name not in joined.inputs or name in joined.outputs]
        return sequential(joined, mapper_of(kept, num_experts(self.architecture)))

    def whole_module(self) -> nn.Module:
        """Return the whole model on the meta device, where nothing is allocated."""
        with torch.device("meta"):
            return self.build(LayerRange(0, self.num_hidden_layers, embedding=True, head=True))


def forward_flops(whole: nn.Module, architecture: DecoderConfig) -> ForwardFlops:
    """Those of a whole model, which may be on the meta device."""
    visited = 1.0
    if isinstance(architecture, MoeConfig):
        visited = architecture.num_experts_per_tok / architecture.num_experts
    by_parameter = {}
    for name, parameter in whole.named_parameters():
        # An embedding is looked up, and multiplied by only where it is the head, too.
        is_table = ".embed_tokens." in name and not architecture.tie_word_embeddings
        if parameter.ndim > 1 and not is_table:
            # Parameters of three dimensions are those of experts.
            by_parameter[name] = 2.0 * parameter.numel() * (visited if parameter.ndim == 3 else 1.0)
    per_pair: Counter[int | None] = Counter()
    for layer in range(architecture.num_hidden_layers):
        # A product with the key, and one with the value.
        per_pair[architecture.window_of(layer)] += 4 * architecture.num_attention_heads * architecture.head_dim
    return ForwardFlops(by_parameter, {window: float(flops) for window, flops in per_pair.items()})
