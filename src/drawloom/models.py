"""
Building blocks for models, beside the ports: layers with the recipe's kernels, initial values, and families.

`Linear`, `Embedding` and `RMSNorm` compute with the recipe's kernels; the first two can be heads, whose cross entropy
never stores all logits. `fill_with_initial_weights` fills a parameter, or its slice, with the same numbers on every
mesh. A family of decoders is made with `DecoderConfig` and `DecoderBuilder`. Mappers between parameters and tensors
in files are combined from `identity`, `rename`, `chunk`, `concatenate`, `stack`, `unstack` and `transpose` by
`parallel` and `sequential`.
"""

from drawloom.components.distributed.rng import derive_seed, fill_normal
from drawloom.components.model.decoder.builder import DecoderBuilder
from drawloom.components.model.decoder.config import DecoderConfig
from drawloom.components.model.decoder.initial_weights import fill_with_initial_weights
from drawloom.components.model.decoder.layer_types import LayerTypesConfig
from drawloom.components.model.layers import ChunkedHead, Embedding, Linear, LinearHead, RMSNorm
from drawloom.components.weights.mapper import (
    chunk,
    concatenate,
    identity,
    parallel,
    rename,
    sequential,
    stack,
    transpose,
    unstack,
)

__all__ = [
    "ChunkedHead",
    "DecoderBuilder",
    "DecoderConfig",
    "Embedding",
    "LayerTypesConfig",
    "Linear",
    "LinearHead",
    "RMSNorm",
    "chunk",
    "concatenate",
    "derive_seed",
    "fill_normal",
    "fill_with_initial_weights",
    "identity",
    "parallel",
    "rename",
    "sequential",
    "stack",
    "transpose",
    "unstack",
]
