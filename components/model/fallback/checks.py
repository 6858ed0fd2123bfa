"""Self-check of a transformers model on a shrunken config, in float64 on the CPU, before it is used."""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.model.fallback.attention import NAME, RowAttention
from drawloom.components.model.fallback.build import build_model, build_without_memory
from drawloom.components.model.fallback.errors import SelfCheckError
from drawloom.components.model.fallback.module import TransformersLM, check_structure
from drawloom.components.model.fallback.shrink import shrink
from drawloom.components.ports.model import LayerRange, TokenContext
from drawloom.kernels.attention import attention_eager, causal_document_mask
from drawloom.kernels.linear import embedding_eager, linear_eager

T = TypeVar("T")

LENGTHS = (9, 7, 13)
"""Tokens of the packed documents; the longest one is longer than three windows."""

TOLERANCE = 1e-4
"""Largest difference relative to the largest value; transformers computes norms in float32."""


MAX_PARAMETERS = 2**25
"""Most parameters of a shrunken model; one with sizes under other names takes too much memory and time to check."""


class PlainKernels:
    """The operations of a self-check, in plain torch."""

    linear = staticmethod(linear_eager)
    embedding = staticmethod(embedding_eager)
    attention = staticmethod(attention_eager)

    def attention_mask(self, documents: Tensor, window: int | None = None, *_: Any) -> Tensor:
        """Return the mask of documents int64 (rows, length): bool (rows, 1, length, length)."""
        return causal_document_mask(documents, window)


@attrs.frozen
class Verdict:
    """
    Result of a self-check that a model passed: why it can't be a pipeline's stages, or "".

    `constants` maps names without layer numbers to the initial value of parameters that start at a constant.
    """

    no_stages: str
    constants: Mapping[str, float]


def name_without_layer(name: str) -> str:
    """Return a parameter's name with the number of its layer replaced by a star."""
    return re.sub(r"\.\d+\.", ".*.", name)


def self_check(config: Any) -> Verdict:
    """
    Check transformers' model of a config. Raises SelfCheckError with the failed check's name: `build`, `layers`,
    `keyword`, `packing` or `head`.

    Packed documents are computed by drawloom, and compared with every document alone in transformers.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        reference = _build(config).double()
        constants = _constants(reference)
        _randomize(reference)
        layers = reference.config.num_hidden_layers
        whole = _span(reference, LayerRange(0, layers, True, True))
        tokens = torch.randint(1, reference.config.vocab_size, (sum(LENGTHS),))
        with torch.no_grad():
            hidden = _compare(whole, reference, tokens)
            return Verdict(_find_stage_fault(reference, tokens, hidden), constants)


def _build(config: Any) -> Any:
    """Build the shrunken model with transformers' eager attention and experts; others lack float64."""
    try:
        small = type(config).from_dict(shrink(config.to_dict()))
        empty = build_without_memory(small)
        check_structure(empty)
        if (count := sum(parameter.numel() for parameter in empty.parameters())) > MAX_PARAMETERS:
            raise SelfCheckError("build", f"the model has {count} parameters even with small sizes")
        return build_model(small, "eager", experts="eager").eval()
    except SelfCheckError:
        raise
    except Exception as error:  # transformers checks values in many ways
        raise SelfCheckError("build", _first_line(error)) from error


def _span(reference: Any, span: LayerRange) -> TransformersLM:
    """Return a span of a copy of the shrunken model, with drawloom's attention and layers."""
    whole = copy.deepcopy(reference)
    whole.config._attn_implementation = NAME  # the copy's modules share the copy's config
    kernels: Any = PlainKernels()
    return TransformersLM(whole, span, kernels).eval()


def _compare(whole: TransformersLM, reference: Any, tokens: Tensor) -> Tensor:
    """Return hidden states of packed documents after comparing them, and logits, with each document alone."""
    shared = pack()
    documents = RowAttention(whole.kernels, shared)
    hidden = _attempt("keyword", lambda: whole.run(tokens[None], shared, documents))
    if documents.calls == 0:
        raise SelfCheckError("keyword", "no layer calls transformers' attention functions")
    rows: Sequence[Tensor] = torch.split(tokens, list(LENGTHS))
    alone = [_attempt("packing", partial(_outputs, reference, row)) for row in rows]
    _assert_close("packing", hidden, torch.cat([states for states, _ in alone], 1), "documents in a row differ")
    logits = whole(tokens[None], shared, lambda hidden, head: head.logits(hidden))
    _assert_close("head", logits, torch.cat([logits for _, logits in alone], 1), "logits are not lm_head's product")
    return hidden


def _outputs(reference: Any, row: Tensor) -> tuple[Tensor, Tensor]:
    """Return transformers' last hidden states and logits for one document, int64 (length,)."""
    states = reference.model(input_ids=row[None], use_cache=False).last_hidden_state
    return states, reference(input_ids=row[None], use_cache=False).logits


def _find_stage_fault(reference: Any, tokens: Tensor, hidden: Tensor) -> str:
    """Return why two stages do not compute what one does, or an empty string."""
    layers, half = reference.config.num_hidden_layers, reference.config.num_hidden_layers // 2
    first = _span(reference, LayerRange(0, half, embedding=True, head=False))
    second = _span(reference, LayerRange(half, layers, embedding=False, head=True))
    embedding = "model.embed_tokens.weight"
    names = {name for name, _ in first.named_parameters()} - {embedding}
    if common := sorted(names & {name for name, _ in second.named_parameters()}):
        return f"{common[0]} is outside of layers"
    shared = pack()
    try:
        between = first.run(tokens[None], shared, RowAttention(first.kernels, shared))
        outputs = second.run(between, shared, RowAttention(second.kernels, shared))
        _assert_close("stages", outputs, hidden, "work outside of layers is repeated in every stage")
    except Exception as error:
        return error.reason if isinstance(error, SelfCheckError) else _first_line(error)
    return ""


def pack() -> TokenContext:
    """Return a row of documents of LENGTHS tokens."""
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    numbers = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    return TokenContext(positions[None], numbers[None])


def _attempt(check: str, compute: Callable[[], T]) -> T:
    try:
        return compute()
    except SelfCheckError:
        raise
    except Exception as error:  # any model of transformers
        raise SelfCheckError(check, _first_line(error)) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _assert_close(check: str, actual: Tensor, expected: Tensor, why: str) -> None:
    difference = float((actual - expected).abs().max() / expected.abs().max())
    if not difference <= TOLERANCE:
        raise SelfCheckError(check, f"{why} by {difference:.1e} of the largest value")


def _constants(reference: nn.Module) -> dict[str, float]:
    """Return constants at which transformers starts parameters, by name without the layer's number."""
    constants = {}
    for name, parameter in reference.named_parameters():
        first = float(parameter.detach().flatten()[0])
        if bool((parameter == first).all()):
            constants[name_without_layer(name)] = first
    return constants


def _randomize(reference: nn.Module) -> None:
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
