"""Adapters in PEFT's format: the tensors of `adapter_model.safetensors`, and `adapter_config.json`."""

from collections import Counter
from typing import Any

from torch import nn

from drawloom.components.ports.adapters import AdaptedLayer, LowRank
from drawloom.components.ports.weights import Mapper, TensorGroup
from drawloom.components.weights.adapted import EMBEDDING, HEAD, adapted_layers
from drawloom.components.weights.mapper import parallel, same
from drawloom.graph import UserError

PREFIX = "base_model.model."
"""What PEFT's names of tensors begin with, before transformers' names in memory."""


def adapter_mapper(whole: nn.Module, tied: bool) -> Mapper:
    """Maps parameters of a model with adapters to PEFT's tensors: those of adapters, and of parts tuned in full."""
    layers = [layer.peft_mapper(name) for name, layer in adapted_layers(whole)]
    return parallel(*layers, *(_saved(name, tied) for name in _saved_parameters(whole)))


def adapter_config(whole: nn.Module, tied: bool, base_model: str | None) -> dict[str, Any]:
    """The `adapter_config.json` of a model with adapters. Raises UserError if PEFT has no such adapters."""
    pairs = [pair for name, layer in adapted_layers(whole) for pair in layer.low_ranks(name)]
    if not pairs:
        raise UserError("an adapter for PEFT needs LoRA; for parts tuned in full, remove it, and take the export")
    if len({pair.dora for pair in pairs}) > 1:
        raise UserError("PEFT has DoRA for all layers or for none; write the same `dora` in all adapters")
    fused = [pair for pair in pairs if pair.fused]
    # PEFT warns of patterns for fused parameters, though it uses them: theirs are the defaults.
    (rank, scale), _ = Counter((pair.rank, pair.scale) for pair in fused or pairs).most_common(1)[0]
    others = [pair for pair in pairs if (pair.rank, pair.scale) != (rank, scale)]
    dropouts = {pair.dropout for pair in pairs}
    saved = list(dict.fromkeys(name.rpartition(".")[0] for name in _saved_parameters(whole)))
    if tied and EMBEDDING in saved:
        saved.append(HEAD.removesuffix(".weight"))  # PEFT copies modules, which unties them
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        # Always plain LoRA: PEFT 0.21 scales adapters with rslora that it fuses by another rank.
        "lora_alpha": scale * rank,
        "use_rslora": False,
        "use_dora": pairs[0].dora,
        # It is used in training alone, and PEFT refuses it beside fused experts.
        "lora_dropout": dropouts.pop() if len(dropouts) == 1 and not fused else 0.0,
        "target_modules": _targets(whole, [pair for pair in pairs if not pair.fused]),
        "target_parameters": [pair.target for pair in fused] or None,
        "rank_pattern": {pair.target: pair.rank for pair in others},
        "alpha_pattern": {pair.target: pair.scale * pair.rank for pair in others},
        "modules_to_save": saved or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _targets(whole: nn.Module, pairs: list[LowRank]) -> list[str]:
    """Names for `target_modules`: the last part alone where all modules that end so are adapted, else the whole."""
    adapted = {pair.target for pair in pairs}
    by_end: dict[str, set[str]] = {}
    for name, _ in whole.named_modules():
        by_end.setdefault(name.rpartition(".")[2], set()).add(name)
    short = {end for end, names in by_end.items() if names <= adapted}
    return sorted({end if (end := name.rpartition(".")[2]) in short else name for name in adapted})


def _saved_parameters(whole: nn.Module) -> list[str]:
    """The parameters of modules that are tuned in full, if only in part: PEFT saves modules."""
    return [
        f"{name}.{leaf}"
        for name, module in whole.named_modules()
        if not isinstance(module, AdaptedLayer)
        for own in [dict(module.named_parameters(recurse=False))]
        if any(parameter.requires_grad for parameter in own.values())
        for leaf in own
    ]


def _saved(name: str, tied: bool) -> Mapper:
    """A parameter of a module that is tuned in full; that of a tied embedding is the head's, too."""
    theirs = [f"{PREFIX}{name}"]
    if tied and name == f"{EMBEDDING}.weight":
        theirs.append(f"{PREFIX}{HEAD}")
    return Mapper((TensorGroup((name,), tuple(theirs), lambda tensors: [*same(tensors)] * len(theirs)),))
