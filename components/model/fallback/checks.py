"""Self-check of a transformers model on a shrunken config, in float64 on the CPU, before it is used."""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.model.fallback.attention import NAME, RowAttention
from drawloom.components.model.fallback.build import build_transformers_model, build_transformers_model_on_meta
from drawloom.components.model.fallback.conversion import create_conversion_mapper
from drawloom.components.model.fallback.errors import SelfCheckError
from drawloom.components.model.fallback.module import TransformersLM
from drawloom.components.model.fallback.parts import (
    CallOrder,
    Parts,
    find_model_parts,
    first_config_value,
    replace_layer_number_by_star,
)
from drawloom.components.model.fallback.shrink import shrink_config
from drawloom.components.ports.model import LayerRange, TokenContext
from drawloom.components.weights.convert import convert_tensors, persistent_tensors
from drawloom.kernels.attention import attention_eager, create_causal_document_mask
from drawloom.kernels.linear import embedding_eager, linear_eager

T = TypeVar("T")

LENGTHS = (9, 7, 13)
"""Tokens of the packed documents; the longest one is longer than three windows."""

TOLERANCE = 1e-4
"""Largest difference relative to the largest value; transformers computes norms in float32."""

MAX_PARAMETERS = 2**25
"""Most parameters of a shrunken model; one with sizes under other names takes too much memory and time to check."""


class PlainKernels:
    """Kernels for a self-check, in plain torch, so that they also support float64."""

    linear = staticmethod(linear_eager)
    embedding = staticmethod(embedding_eager)
    attention = staticmethod(attention_eager)

    def attention_mask(self, documents: Tensor, window: int | None = None, *_: Any) -> Tensor:
        """Return the mask of documents int64 (rows, length): bool (rows, 1, length, length)."""
        return create_causal_document_mask(documents, window)


@attrs.frozen
class Verdict:
    """
    Result of a passed self-check: its parts, and why it can't be a pipeline's stages, or "".

    `constants` maps names without layer numbers to the initial value of parameters that start at a constant.
    """

    parts: Parts
    no_stages: str
    constants: Mapping[str, float]


def run_self_check(config: Any) -> Verdict:
    """
    Check transformers' model of a config. Raises SelfCheckError with the failed check's name: `build`, `layers`,
    `keyword`, `packing`, `head` or `weights`.

    Packed documents are computed by drawloom, and compared with every document alone in transformers.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        reference = _build_shrunken_reference(config).double()
        constants = _find_constant_parameters(reference)
        _perturb_parameters(reference)
        with torch.no_grad():
            comparison = Comparison(reference)
            hidden = comparison.check_and_return_hidden_states()
            comparison.check_logits_and_detect_plain_head()
            comparison.check_weights_survive_round_trip()
            return Verdict(comparison.parts, comparison.find_stage_fault(hidden), constants)


def _build_shrunken_reference(config: Any) -> Any:
    """Build the shrunken model with transformers' eager attention and experts; others lack float64."""
    try:
        small = shrink_config(config)
        empty = build_transformers_model_on_meta(small)
        find_model_parts(empty)
        if (count := sum(parameter.numel() for parameter in empty.parameters())) > MAX_PARAMETERS:
            raise SelfCheckError("build", f"the model has {count} parameters even with small sizes")
        return build_transformers_model(small, "eager", experts="eager").eval()
    except SelfCheckError:
        raise
    except Exception as error:  # transformers checks values in many ways
        if isinstance(error, KeyError) and error.args == (NAME,):
            raise SelfCheckError(
                "keyword", "the model does not compute attention by transformers' attention functions"
            ) from error
        raise SelfCheckError("build", _get_first_line_without_colon(error)) from error


class Comparison:
    """A shrunken model of transformers, and the same model with drawloom's attention and layers."""

    def __init__(self, reference: Any) -> None:
        self.reference = reference
        self.parts = find_model_parts(reference)
        self.count = len(reference.get_submodule(self.parts.layers))
        self.tokens = torch.randint(1, first_config_value(reference.config, "vocab_size"), (sum(LENGTHS),))
        rows: Sequence[Tensor] = torch.split(self.tokens, list(LENGTHS))
        with CallOrder(reference, self.parts) as calls:
            self.alone = [
                convert_errors_to_failed_check("build", partial(self._compute_reference_hidden_states_and_logits, row))
                for row in rows
            ]
        self.parts = calls.extend_parts_by_observed_modules()

    def _compute_reference_hidden_states_and_logits(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Return transformers' last hidden states and logits for one document, int64 (length,)."""
        base = self.reference.get_submodule(self.parts.base)
        states = base(input_ids=row[None], use_cache=False).last_hidden_state
        return states, self.reference(input_ids=row[None], use_cache=False).logits

    def check_and_return_hidden_states(self) -> Tensor:
        """Compare packed documents' hidden states with transformers'; return them, (1, length, hidden_size)."""
        whole = self._build_stage_module(0, self.count)
        shared = create_packed_context()
        documents = RowAttention(whole.kernels, shared)
        hidden = convert_errors_to_failed_check(
            "keyword", lambda: whole.run_base_model(self.tokens[None], shared, documents)
        )
        if documents.calls == 0:
            raise SelfCheckError("keyword", "no layer calls transformers' attention functions")
        expected = torch.cat([states for states, _ in self.alone], 1)
        _assert_close("packing", hidden, expected, "hidden states of packed documents differ from separate documents'")
        return hidden

    def check_logits_and_detect_plain_head(self) -> None:
        """Compare a plain linear head's logits; if they differ, unset `plain_head` and compare transformers' head."""
        try:
            self._check_logits_close()
        except SelfCheckError:
            self.parts = attrs.evolve(self.parts, plain_head=False)
            self._check_logits_close()

    def _check_logits_close(self) -> None:
        """Raise SelfCheckError if logits for the packed row differ from transformers' for single documents."""
        whole, shared = self._build_stage_module(0, self.count), create_packed_context()
        compute = partial(whole, self.tokens[None], shared, lambda hidden, head: head.logits(hidden))
        expected = torch.cat([logits for _, logits in self.alone], 1)
        _assert_close("head", convert_errors_to_failed_check("head", compute), expected, "logits differ")

    def check_weights_survive_round_trip(self) -> None:
        """Raise SelfCheckError if converting parameters to tensors on disk and back changes them."""
        tensors = persistent_tensors(self._build_stage_module(0, self.count))
        mapper = create_conversion_mapper(self.reference, [*tensors])
        again = convert_errors_to_failed_check(
            "weights", lambda: convert_tensors(mapper.inverse(), convert_tensors(mapper, tensors))
        )
        if wrong := [name for name, tensor in tensors.items() if not torch.equal(again[name], tensor)]:
            raise SelfCheckError("weights", f"{wrong[0]} changes when it is converted to files and back")

    def find_stage_fault(self, hidden: Tensor) -> str:
        """Return why two pipeline stages do not compute `hidden`, (1, length, hidden_size); "" if they do."""
        half = self.count // 2
        first, second = self._build_stage_module(0, half), self._build_stage_module(half, self.count)
        names = {name for name, _ in first.named_parameters()} - {f"{self.parts.embedding}.weight"}
        if common := sorted(names & {name for name, _ in second.named_parameters()}):
            return f"{common[0]} is outside of layers"
        shared = create_packed_context()
        try:
            between = first.run_base_model(self.tokens[None], shared, RowAttention(first.kernels, shared))
            outputs = second.run_base_model(between, shared, RowAttention(second.kernels, shared))
            _assert_close("stages", outputs, hidden, "work outside of layers is repeated in every stage")
        except Exception as error:
            return error.reason if isinstance(error, SelfCheckError) else _get_first_line_without_colon(error)
        return ""

    def _build_stage_module(self, first: int, last: int) -> TransformersLM:
        """Return a span of a copy of the shrunken model, with drawloom's attention and layers."""
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


def convert_errors_to_failed_check(check: str, compute: Callable[[], T]) -> T:
    """Return `compute()`; turn any exception into a SelfCheckError with the check's name."""
    try:
        return compute()
    except SelfCheckError:
        raise
    except Exception as error:  # any model of transformers
        raise SelfCheckError(check, _get_first_line_without_colon(error)) from error


def _get_first_line_without_colon(error: Exception) -> str:
    """Return the first line in an error's text that does not end in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if not line.endswith(":")), type(error).__name__)


def _assert_close(check: str, actual: Tensor, expected: Tensor, why: str) -> None:
    """Raise SelfCheckError if the largest difference exceeds TOLERANCE times the largest expected value."""
    difference = float((actual - expected).abs().max() / expected.abs().max())
    if not difference <= TOLERANCE:
        raise SelfCheckError(check, f"{why}; the largest difference is {difference:.1e} of the largest value")


def _find_constant_parameters(reference: nn.Module) -> dict[str, float]:
    """Return the initial value for every parameter whose elements are all equal, by name without the layer's number."""
    constants = {}
    for name, parameter in reference.named_parameters():
        first = float(parameter.detach().flatten()[0])
        if bool((parameter == first).all()):
            constants[replace_layer_number_by_star(name)] = first
    return constants


def _perturb_parameters(reference: nn.Module) -> None:
    """Add normal noise, so that constant parameters such as norms and biases influence the outputs."""
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
