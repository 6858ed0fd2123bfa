"""Small Qwen3 models with random weights, and the same models in transformers."""

from collections.abc import Collection, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.kernels.auto import AutoKernels
from drawloom.components.model.decoder.builder import DecoderBuilder
from drawloom.components.model.qwen3.dense import Qwen3Dense
from drawloom.components.model.qwen3.moe import Qwen3Moe
from drawloom.components.ports.data import IGNORE_INDEX
from drawloom.components.ports.model import LayerRange, TokenContext
from drawloom.components.ports.weights import Mapper
from drawloom.components.weights.load import convert, persistent_tensors

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "vocab_size": 29,
}

SPARSE_SIZES: dict[str, Any] = SIZES | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}


def cpu_kernels(**choices: Any) -> AutoKernels:
    """Kernels on a CPU, those that `auto` takes unless others are chosen."""
    return kernels_on(torch.device("cpu"), **choices)


def kernels_on(device: torch.device, **choices: Any) -> AutoKernels:
    """Kernels on a device, those that `auto` takes unless others are chosen."""
    kind: Any = device.type
    compute: Any = ComputeDevice(kind=kind, share=True)
    return AutoKernels(device=compute, **choices)


def dense(**changes: Any) -> Qwen3Dense:
    """A small model, with other sizes or kernels if given."""
    return Qwen3Dense(**({"kernels": cpu_kernels()} | SIZES | changes))


def sparse(**changes: Any) -> Qwen3Moe:
    """A small model with experts, with other sizes or kernels if given."""
    return Qwen3Moe(**({"kernels": cpu_kernels()} | SPARSE_SIZES | changes))


def whole(model: DecoderBuilder) -> nn.Module:
    """All of a model in one module, every tensor random: norms of weight 1 would hide that they are not used."""
    module = model.build(LayerRange(0, model.num_hidden_layers, embedding=True, head=True))
    for tensor in persistent_tensors(module).values():
        nn.init.normal_(tensor, 1.0 if tensor.ndim == 1 else 0.0, 0.2)
    return module


def twin(model: DecoderBuilder, parameters: Mapping[str, Tensor], **settings: Any) -> Any:
    """The same model in transformers, with the same weights."""
    from transformers import AutoConfig, AutoModelForCausalLM  # takes seconds, which ranks of other tests do without

    # transformers computes no gradient for the embedding of a padding token.
    plain = {"attn_implementation": "eager", "experts_implementation": "eager", "pad_token_id": None}
    kinds: Any = AutoModelForCausalLM
    config = AutoConfig.for_model(**model.hugging_face_config() | plain | settings)
    made = kinds.from_config(config)
    state = as_in_transformers(model, {name: tensor.detach() for name, tensor in parameters.items()}, made.state_dict())
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    made.load_state_dict(state)
    return made


def as_in_transformers(
    model: DecoderBuilder, tensors: Mapping[str, Tensor], names: Collection[str]
) -> dict[str, Tensor]:
    """Tensors (any shape) under the names of transformers' modules: ours, or where there is none that of files."""
    mapper = model.hugging_face_mapper()
    others = Mapper(tuple(group for group in mapper.groups if not set(group.inputs) <= set(names)))
    kept = {name: tensor for name, tensor in tensors.items() if name not in others.inputs}
    return kept | convert(Mapper(tuple(g for g in others.groups if set(g.inputs) <= tensors.keys())), tensors)


def one_document(rows: int, length: int) -> TokenContext:
    """Rows that are each one document: positions and document ids int64 (rows, length), no weights."""
    positions = torch.arange(length).expand(rows, -1)
    return TokenContext(positions, torch.zeros_like(positions))


def pack_documents(lengths: list[list[int]]) -> TokenContext:
    """Rows of documents of these lengths."""
    positions = [torch.cat([torch.arange(length) for length in row]) for row in lengths]
    documents = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]
    return TokenContext(torch.stack(positions), torch.stack(documents))


def to(device: torch.device, shared: TokenContext) -> TokenContext:
    """A context without weights, on another device."""
    return TokenContext(shared.positions.to(device), shared.document_ids.to(device))


def weights_of(targets: Tensor) -> Tensor:
    """1 for each token that has a target, else 0: float32, of the shape of targets."""
    return (targets != IGNORE_INDEX).float()


def losses_of(module: Any, inputs: Tensor, shared: TokenContext, targets: Tensor) -> Any:
    """Losses by token (rows, length) of a module with a head, each token weighing 1, in the router's loss too."""
    weighted = attrs.evolve(shared, weights=weights_of(targets))
    return module(inputs, weighted, lambda hidden, head: head.token_losses(hidden, targets)[0])


def logits_of(module: Any, inputs: Tensor, shared: TokenContext) -> Any:
    """Logits (rows, length, vocab_size) of a module with a head."""
    return module(inputs, shared, lambda hidden, head: head.logits(hidden))
