"""What the families of Qwen3 models have in common: settings, sizes, and all but the feed-forward networks."""

from abc import abstractmethod
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar, dataclass_transform

import attrs
from torch import Tensor, nn

from drawloom.components.model.qwen3.config import Qwen3Config
from drawloom.components.model.qwen3.family import Family
from drawloom.components.model.qwen3.hf_names import mapper_of
from drawloom.components.model.qwen3.hugging_face import config_of
from drawloom.components.model.qwen3.initial_weights import fill_with_initial_weights
from drawloom.components.model.qwen3.model import Qwen3Model
from drawloom.components.model.qwen3.rope_scaling import RopeScaling
from drawloom.components.model.qwen3.settings import choose_architecture, faults
from drawloom.components.ports.data import Tokenizer
from drawloom.components.ports.model import Kernels, LayerRange
from drawloom.components.ports.weights import Mapper
from drawloom.graph import Problem, above, at_least, setting

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, field_specifiers=(setting, attrs.field))
def inherited(cls: type[T]) -> type[T]:
    """Make a class's fields those of the components that inherit from it; type checkers see them as `component`'s."""
    return attrs.define(cls, slots=False, eq=False, kw_only=True)


@inherited
class Qwen3Builder:
    """A Qwen3 model of sizes given by settings or by a Hugging Face `config.json`."""

    family: ClassVar[Family]

    kernels: Kernels
    tokenizer: Tokenizer | None = None
    config: Path | None = setting(default=None, doc="a Hugging Face config.json or its folder, instead of what follows")
    _num_hidden_layers: int | None = setting(
        default=None, alias="num_hidden_layers", check=at_least(1), doc="how many layers"
    )
    hidden_size: int | None = setting(default=None, check=at_least(1), doc="channels of the hidden states")
    num_attention_heads: int | None = setting(default=None, check=at_least(1), doc="query heads")
    num_key_value_heads: int | None = setting(
        default=None, check=at_least(1), doc="key and value heads; heads if left out"
    )
    head_dim: int | None = setting(default=None, check=at_least(1), doc="channels of a head; width / heads if left out")
    intermediate_size: int | None = setting(
        default=None, check=at_least(1), doc="channels inside the feed-forward network"
    )
    _vocab_size: int | None = setting(
        default=None, alias="vocab_size", check=at_least(1), doc="token ids; the tokenizer's if left out"
    )
    vocabulary_multiple: int = setting(
        default=1, check=at_least(1), doc="the tokenizer's vocabulary is rounded up to a multiple of this"
    )
    tie_word_embeddings: bool | None = setting(default=None, doc="whether the head is the embedding; false if left out")
    max_position_embeddings: int | None = setting(
        default=None, check=at_least(1), change="free", doc="longest text that an export claims; 32768 if left out"
    )
    rope_theta: float | None = setting(
        default=None, check=above(1), change="semantic", doc="base of rotary positions; 1e6 if left out"
    )
    rope_scaling: RopeScaling | None = setting(
        default=None, change="semantic", doc="how rotary positions are stretched for longer texts; not if left out"
    )
    rms_norm_eps: float | None = setting(
        default=None, check=above(0), change="semantic", doc="added to mean squares in norms; 1e-6 if left out"
    )
    initializer_range: float | None = setting(
        default=None, check=above(0), change="semantic", doc="standard deviation of initial weights; 0.02 if left out"
    )

    @classmethod
    def constraints(cls, node: Any) -> Iterator[Problem]:
        """What the settings of a recipe can't be together."""
        for fault in faults(cls.family, node.settings, bool(node.neighbours("tokenizer"))):
            yield node.fault(fault.key, fault.why, fault.instead)

    @classmethod
    def weigh_change(cls, node: Any, key: str) -> str | None:
        """The longest text is a claim and no more, but where positions beyond it are stretched."""
        rope = node.settings["rope_scaling"]
        return "semantic" if key == "max_position_embeddings" and rope and rope.kind == "dynamic" else None

    @cached_property
    def architecture(self) -> Qwen3Config:
        """All sizes, settled; read on first use, when the tokenizer is open."""
        cls: Any = type(self)
        settings = {field.alias: getattr(self, field.name) for field in attrs.fields(cls)}
        tokens = None if self.tokenizer is None else self.tokenizer.vocab_size
        return choose_architecture(self.family, settings, tokens)

    @property
    def num_hidden_layers(self) -> int:
        return self.architecture.num_hidden_layers

    @property
    def vocab_size(self) -> int:
        return self.architecture.vocab_size

    @abstractmethod
    def feed_forward_of(self, number: int) -> nn.Module:
        """The feed-forward network of a layer: it takes hidden states and targets, and gives hidden states."""

    def build(self, span: LayerRange) -> nn.Module:
        return Qwen3Model(self.architecture, span, self.kernels, self.feed_forward_of)

    def initialise(self, name: str, parameter: Tensor, seed: int) -> None:
        std, layers = self.architecture.initializer_range, self.architecture.num_hidden_layers
        fill_with_initial_weights(name, parameter, seed=seed, layers=layers, std=std)

    def hugging_face_config(self) -> dict[str, Any]:
        return config_of(self.family, self.architecture, None if self.tokenizer is None else self.tokenizer.eos_id)

    def hugging_face_mapper(self) -> Mapper:
        return mapper_of(self.architecture)
