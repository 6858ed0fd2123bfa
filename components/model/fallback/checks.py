"""Self-check of a transformers model on a shrunken config, in float64 on the CPU, before it is used."""

import copy
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from drawloom.components.model.fallback.build import (
    build_meta_model,
    build_transformers_model,
    create_conversion_mapper,
)
from drawloom.components.model.fallback.module import (
    NAME,
    Parts,
    RowAttention,
    SelfCheckError,
    TransformersLM,
    add_outer_modules,
    find_model_parts,
    first_config_value,
    get_first_line,
    mask_layer_number,
)
from drawloom.components.weights.load import convert_tensors, persistent_tensors
from drawloom.kernels.attention.eager import attention_eager, create_causal_document_mask
from drawloom.kernels.linear import embedding_eager, linear_eager
from drawloom.ports import ConfigJson, LayerRange, Settings, TokenContext

LENGTHS = (9, 7, 13)
"""Tokens of the packed documents; the longest one is longer than three windows."""

TOLERANCE = 1e-4
"""Largest difference relative to the largest value; transformers computes norms in float32."""

MAX_PARAMETERS = 2**25
"""Most parameters of a shrunken model; one with sizes under other names takes too much memory and time to check."""


MAX_LAYERS = 6
MAX_WIDTH = 48
WIDE_HEAD = 256

SMALL = tomllib.loads(Path(__file__).with_name("small_sizes.toml").read_text("utf-8"))
"""Maximum values of sizes; a smaller value, zero and None stay."""

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
"""Sizes that have other keys in some families: `n_embd`."""

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class PlainKernels:
    """Kernels for a self-check, in plain torch, so that they also support float64."""

    linear = staticmethod(linear_eager)
    embedding = staticmethod(embedding_eager)
    attention = staticmethod(attention_eager)

    def attention_mask(self, documents: Tensor, window: int | None = None, *_: Any) -> Tensor:
        """Return the mask of documents int64 (rows, length): bool (rows, 1, length, length)."""
        return create_causal_document_mask(documents, window)


def run_self_check(config: Any) -> Parts:
    """
    Check transformers' model of a config, and return its parts.

    Raises SelfCheckError with the failed check's name: `build`, `layers`, `keyword`, `packing`, `head` or `weights`.
    Packed documents are computed by drawloom, and compared with every document alone in transformers.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        reference = _build_shrunken_reference(config).double()
        with torch.no_grad():
            constants = {
                mask_layer_number(name): float(parameter.flatten()[0])
                for name, parameter in reference.named_parameters()
                if bool((parameter == parameter.flatten()[0]).all())
            }
            for parameter in reference.parameters():
                # Constant parameters such as norms and biases should influence the outputs.
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            comparison = Comparison(reference)
            hidden = comparison.check_hidden_states()
            comparison.check_logits_and_head()
            comparison.check_weights()
            why = comparison.find_stage_fault(hidden)
            return attrs.evolve(comparison.parts, no_stages=why, constants=constants)


def _build_shrunken_reference(config: Any) -> Any:
    """Build the shrunken model with transformers' eager attention and experts; others lack float64."""
    with convert_errors("build"):
        small = shrink_config(config)
        empty = build_meta_model(small)
        find_model_parts(empty)
        if (count := sum(parameter.numel() for parameter in empty.parameters())) > MAX_PARAMETERS:
            raise SelfCheckError("build", f"the model has {count} parameters even with small sizes")
        return build_transformers_model(small, "eager", experts="eager").eval()


class Comparison:
    """A shrunken model of transformers, and the same model with drawloom's attention and layers."""

    def __init__(self, reference: Any) -> None:
        self.reference = reference
        self.parts = find_model_parts(reference)
        self.count = len(reference.get_submodule(self.parts.layers))
        self.tokens = torch.randint(1, first_config_value(reference.config, "vocab_size"), (sum(LENGTHS),))
        rows: Sequence[Tensor] = torch.split(self.tokens, list(LENGTHS))
        calls: list[nn.Module] = []
        with convert_errors("build"):
            self.alone = [self._compute_reference(row) for row in rows]
            with register_module_forward_pre_hook(lambda module, _: calls.append(module)):
                self._compute_hidden_states(rows[0])
        self.parts = add_outer_modules(reference, self.parts, calls)
        self.shared = create_packed_context()

    def _compute_hidden_states(self, row: Tensor) -> Tensor:
        """Return transformers' last hidden states for one document, int64 (length,)."""
        base = self.reference.get_submodule(self.parts.base)
        return base(input_ids=row[None], use_cache=False).last_hidden_state  # type: ignore[no-any-return]

    def _compute_reference(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Return transformers' last hidden states and logits for one document, int64 (length,)."""
        return self._compute_hidden_states(row), self.reference(input_ids=row[None], use_cache=False).logits

    def check_hidden_states(self) -> Tensor:
        """Compare packed documents' hidden states with transformers'; return them, (1, length, hidden_size)."""
        whole = self._build_module()
        documents = RowAttention(whole.kernels, self.shared)
        with convert_errors("keyword"):
            hidden = whole.run_base_model(self.tokens[None], self.shared, documents)
        if documents.calls == 0:
            raise SelfCheckError("keyword", "no layer calls transformers' attention functions")
        expected = torch.cat([states for states, _ in self.alone], 1)
        _assert_close("packing", hidden, expected, "hidden states of packed documents differ from separate documents'")
        return hidden

    def check_logits_and_head(self) -> None:
        """Compare a plain linear head's logits; if they differ, unset `plain_head` and compare transformers' head."""
        try:
            self._check_logits_close()
        except SelfCheckError:
            self.parts = attrs.evolve(self.parts, plain_head=False)
            self._check_logits_close()

    def _check_logits_close(self) -> None:
        """Raise SelfCheckError if logits for the packed row differ from transformers' for single documents."""
        whole = self._build_module()
        with convert_errors("head"):
            logits = whole(self.tokens[None], self.shared, lambda hidden, head: head.logits(hidden))
        _assert_close("head", logits, torch.cat([alone for _, alone in self.alone], 1), "logits differ")

    def check_weights(self) -> None:
        """Raise SelfCheckError if converting parameters to tensors on disk and back changes them."""
        tensors = persistent_tensors(self._build_module())
        mapper = create_conversion_mapper(self.reference, [*tensors])
        with convert_errors("weights"):
            again = convert_tensors(mapper.inverse(), convert_tensors(mapper, tensors))
        if wrong := [name for name, tensor in tensors.items() if not torch.equal(again[name], tensor)]:
            raise SelfCheckError("weights", f"{wrong[0]} changes when it is converted to files and back")

    def find_stage_fault(self, hidden: Tensor) -> str:
        """Return why two pipeline stages do not compute `hidden`, (1, length, hidden_size); "" if they do."""
        half = self.count // 2
        first, second = self._build_module(last=half), self._build_module(half)
        names = {name for name, _ in first.named_parameters()} - {f"{self.parts.embedding}.weight"}
        if common := sorted(names & {name for name, _ in second.named_parameters()}):
            return f"{common[0]} is outside of layers"
        try:
            with convert_errors("stages"):
                outputs = second(first(self.tokens[None], self.shared), self.shared)
                _assert_close("stages", outputs, hidden, "work outside of layers is repeated in every stage")
        except SelfCheckError as error:
            return error.reason
        return ""

    def _build_module(self, first: int = 0, last: int | None = None) -> TransformersLM:
        """Return a span of a copy of the shrunken model, or all of it, with drawloom's attention and layers."""
        last = self.count if last is None else last
        whole = copy.deepcopy(self.reference)
        whole.config._attn_implementation = NAME  # the copy's modules share the copy's config
        kernels: Any = PlainKernels()
        span = LayerRange(first, last, first == 0, last == self.count)
        return TransformersLM(whole, self.parts, span, kernels).eval()


def create_packed_context() -> TokenContext:
    """Return the context for one row that packs documents with LENGTHS tokens."""
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    numbers = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    return TokenContext(positions[None], numbers[None])


@contextmanager
def convert_errors(check: str) -> Iterator[None]:
    """Turn any exception into a SelfCheckError with the check's name."""
    try:
        yield
    except SelfCheckError:
        raise
    except Exception as error:  # any model of transformers
        if isinstance(error, KeyError) and error.args == (NAME,):
            why = "the model does not compute attention by transformers' attention functions"
            raise SelfCheckError("keyword", why) from error
        raise SelfCheckError(check, get_first_line(error)) from error


def _assert_close(check: str, actual: Tensor, expected: Tensor, why: str) -> None:
    """Raise SelfCheckError if the largest difference exceeds TOLERANCE times the largest expected value."""
    difference = float((actual - expected).abs().max() / expected.abs().max())
    if not difference <= TOLERANCE:
        raise SelfCheckError(check, f"{why}; the largest difference is {difference:.1e} of the largest value")


def shrink_config(config: Any) -> Any:
    """Return the transformers config of a smaller model with the same flags and kinds of layers."""
    attribute_map: Mapping[str, str] = config.attribute_map
    names = {key: name for name, key in attribute_map.items() if name in (*SIZES, *SMALL)}
    small = shrink_config_values({names.get(key, key): value for key, value in config.to_dict().items()})
    own = {name: key for key, name in names.items()}
    return type(config).from_dict({own.get(key, key): value for key, value in small.items()})


def shrink_config_values(config: Settings) -> ConfigJson:
    """Return the values of a smaller model's config; keys have the names of Llama's config."""
    small = {key: _shrink_value(key, value) for key, value in config.items()}
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(heads, int) and heads > 0:
        width = config.get("hidden_size", 0) // heads
        small["num_attention_heads"] = min(heads, 2 if width >= WIDE_HEAD else 4)
        if config.get("head_dim") in (None, width) and "qk_nope_head_dim" not in config:
            # The width of heads stays, because tables of rotary positions have its length.
            small["hidden_size"] = small["num_attention_heads"] * width
        if isinstance(kv_heads, int):
            # The sharing stays: one for all queries, one per query head, or grouped.
            grouped = max(1, small["num_attention_heads"] // 2)
            small["num_key_value_heads"] = {1: 1, heads: small["num_attention_heads"]}.get(kv_heads, grouped)
    if config.get("head_dim") and "qk_rope_head_dim" in small:
        small["head_dim"] = min(config["head_dim"], small["qk_rope_head_dim"])  # the width that is rotated
    if (head_dim := config.get("qk_head_dim")) is not None and "qk_nope_head_dim" in config:
        small["qk_head_dim"] = small["qk_nope_head_dim"] + small["qk_rope_head_dim"] if head_dim else head_dim
    return small | _shrink_layer_keys(config)


def _shrink_value(key: str, value: Any) -> Any:
    """Return a small value for a size, and any other value unchanged."""
    if key.endswith("_token_id"):
        return 0 if key == "pad_token_id" and value else [1] if isinstance(value, list) else value and 1
    if isinstance(value, dict) and any(size in value for size in SIZES):
        return shrink_config_values(value)  # of a part of the model: `text_config`, `vision_config`
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if "intermediate_size" in key or key.endswith("ffn_dim"):
        return min(value, MAX_WIDTH)
    if key in EXPERT_COUNTS:
        return min(value, 4)
    return min(value, SMALL[key]) if key in SMALL else value


def _shrink_layer_keys(config: Settings) -> ConfigJson:
    """Return a small number of layers, and lists and tables by layer cut to it."""
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int):
        return {}
    by_layer = {key: value for key, value in config.items() if isinstance(value, list) and len(value) == layers}
    count = min(layers, MAX_LAYERS if by_layer else 4)
    small: ConfigJson = {key: value[:count] for key, value in by_layer.items()}
    for key, value in config.items():
        if isinstance(value, dict) and value and all(str(layer).isdigit() for layer in value):
            small[key] = {layer: value[layer] for layer in value if int(layer) < count}
    return {"num_hidden_layers": count} | small
