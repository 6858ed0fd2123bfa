"""Small Qwen3 models with random weights, and their equals in transformers."""

from collections.abc import Collection, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.kernels.auto import AutoKernels
from drawloom.components.model.decoder.builder import DecoderModel
from drawloom.components.model.qwen3.dense import Qwen3Dense
from drawloom.components.model.qwen3.moe import Qwen3Moe
from drawloom.components.ports.data import IGNORE_INDEX
from drawloom.components.ports.model import LayerRange, TokenContext
from drawloom.components.ports.weights import Mapper
from drawloom.components.weights.load import convert_tensors, persistent_tensors

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
    """Return kernels on a CPU, with `auto` unless others are chosen."""
    return kernels_on(torch.device("cpu"), **choices)


def kernels_on(device: torch.device, **choices: Any) -> AutoKernels:
    """Return kernels on a device, with `auto` unless others are chosen."""
    kind: Any = device.type
    compute: Any = ComputeDevice(kind=kind, share=True)
    return AutoKernels(device=compute, **choices)


def dense(**changes: Any) -> Qwen3Dense:
    """Return a small model, with changed sizes or kernels."""
    return Qwen3Dense(**({"kernels": cpu_kernels()} | SIZES | changes))


def sparse(**changes: Any) -> Qwen3Moe:
    """Return a small model with experts, with changed sizes or kernels."""
    return Qwen3Moe(**({"kernels": cpu_kernels()} | SPARSE_SIZES | changes))


def whole(model: DecoderModel) -> nn.Module:
    """Return a whole model in one module, with every tensor random: unused norms would not show at weight 1."""
    module = model.build(LayerRange.of_whole_model(model.num_hidden_layers))
    for tensor in persistent_tensors(module).values():
        nn.init.normal_(tensor, 1.0 if tensor.ndim == 1 else 0.0, 0.2)
    return module


def twin(model: DecoderModel, parameters: Mapping[str, Tensor], **settings: Any) -> Any:
    """Return the same model in transformers, with the same weights."""
    from transformers import AutoConfig, AutoModelForCausalLM  # takes seconds, which ranks of other tests do without

    # transformers computes no gradient for the embedding of a padding token.
    plain = {"attn_implementation": "eager", "experts_implementation": "eager", "pad_token_id": None}
    kinds: Any = AutoModelForCausalLM
    config = AutoConfig.for_model(**model.hugging_face_config() | plain | settings)
    reference = kinds.from_config(config)
    state = as_in_transformers(
        model, {name: tensor.detach() for name, tensor in parameters.items()}, reference.state_dict()
    )
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    reference.load_state_dict(state)
    return reference


def as_in_transformers(model: DecoderModel, tensors: Mapping[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
    """Tensors (any shape) as in the modules of transformers: mapped where modules are like files, else unchanged."""
    mapper = model.hugging_face_mapper()
    renamed = Mapper(tuple(group for group in mapper.groups if set(group.outputs) <= set(names)))
    kept = {name: tensor for name, tensor in tensors.items() if name not in renamed.inputs}
    return kept | convert_tensors(renamed, tensors)


def one_document(rows: int, length: int) -> TokenContext:
    """Return rows with one document each: positions and document ids int64 (rows, length), no weights."""
    positions = torch.arange(length).expand(rows, -1)
    return TokenContext(positions, torch.zeros_like(positions))


def pack_documents(lengths: list[list[int]]) -> TokenContext:
    """Return rows of documents of these lengths."""
    positions = [torch.cat([torch.arange(length) for length in row]) for row in lengths]
    documents = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]
    return TokenContext(torch.stack(positions), torch.stack(documents))


def to(device: torch.device, shared: TokenContext) -> TokenContext:
    """Return a context without weights on another device."""
    return TokenContext(shared.positions.to(device), shared.document_ids.to(device))


def weights_of(targets: Tensor) -> Tensor:
    """Return 1 for each token with a target, else 0: float32, of the targets' shape."""
    return (targets != IGNORE_INDEX).float()


def losses_of(module: Any, inputs: Tensor, shared: TokenContext, targets: Tensor) -> Any:
    """Return losses by token (rows, length) for a module with a head; each token weighs 1, in the router's loss too."""
    weighted = attrs.evolve(shared, weights=weights_of(targets))
    return module(inputs, weighted, lambda hidden, head: head.token_losses(hidden, targets)[0])


def logits_of(module: Any, inputs: Tensor, shared: TokenContext) -> Any:
    """Return logits (rows, length, vocab_size) for a module with a head."""
    return module(inputs, shared, lambda hidden, head: head.logits(hidden))
