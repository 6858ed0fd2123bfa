"""LoRA: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685."""

import math
from collections.abc import Collection

from torch import nn

from drawloom import UserError, above, between, component, setting
from drawloom.components.adapters.lora_layers import LoraEmbedding, LoraExperts, LoraLinear, LoraOptions, LoraTiedHead
from drawloom.components.adapters.targets import find_pattern_fault, list_matching_patterns
from drawloom.components.model.decoder.experts import Experts
from drawloom.components.model.decoder.model import CausalLM
from drawloom.components.model.layers import Embedding, Linear
from drawloom.ports import AdaptedLayer


@component
class Lora:
    """
    LoRA: low-rank factors beside frozen weights. A weight W computes as W + scale * B A; B begins as zeros.

    LoRA adapts linear layers, the embedding, the head and experts. With dropout, losses depend on the row partition
    over ranks. PEFT loads files from `export.adapter`.
    """

    targets: list[str] = setting(
        'patterns for module names in transformers, or their ends: "q_proj", "layers.[0-3].mlp.*", also parts of '
        'joined modules, such as "q_proj" of "qkv_proj"; for experts "experts", "experts.gate_up_proj" or '
        '"experts.down_proj"',
        check=find_pattern_fault,
        impact="incompatible",
    )
    rank: int = setting(
        "rank of the factors: A has so many rows, B so many columns", check=between(1, 100_001), impact="incompatible"
    )
    alpha: float = setting("numerator of the scale: alpha / rank, or with rslora alpha / sqrt(rank)", check=above(0))
    rslora: bool = setting("divide alpha by sqrt(rank), for high ranks (arXiv 2312.03732)", default=False)
    dora: bool = setting(
        "train the row norms of W + scale * B A separately (DoRA, arXiv 2402.09353)",
        default=False,
        impact="incompatible",
    )
    dropout: float = setting("dropout probability for A's inputs", default=0.0, check=between(0, 1))

    @property
    def options(self) -> LoraOptions:
        """The adapted layers' options."""
        scale = self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)
        return LoraOptions(self.rank, scale, self.dropout, self.dora)

    def adapt_and_list_matched_targets(self, module: nn.Module) -> Collection[str]:
        """Replace the layers matching a pattern. Raises UserError if a layer is trained already."""
        matched: set[str] = set()
        if isinstance(module, CausalLM):
            module.name_joined_layers()
        for name, layer in list(module.named_modules()):
            targets_by_name = {
                target_name: list_matching_patterns(target_name, self.targets)
                for target_name in _list_matchable_names(name, layer)
            }
            if adapted := [target_name for target_name, targets in targets_by_name.items() if targets]:
                matched.update(*targets_by_name.values())
                owner, _, leaf = name.rpartition(".")
                setattr(module.get_submodule(owner), leaf, self._adapt_layer(name, layer, adapted))
        if (
            isinstance(module, CausalLM)
            and module.tied
            and module.span.head
            and list_matching_patterns("lm_head", self.targets)
        ):
            matched.update(list_matching_patterns("lm_head", self.targets))
            module.add_module("lm_head", self._create_tied_head_adapter(module))
        return matched

    def _create_tied_head_adapter(self, module: CausalLM) -> LoraTiedHead:
        """Return the adapter for a head with the embedding's weight."""
        table = module.model.embed_tokens
        if module.lm_head is not None:
            raise UserError("adapters: lm_head is named by two adapters; name it in one of them", exit_code=2)
        if type(table) is not Embedding or table.weight.requires_grad:
            raise UserError("adapters: lm_head is tied to embed_tokens, which is adapted, too; adapt one of them", 2)
        if self.dora:
            raise UserError(
                "adapters: DoRA does not support lm_head tied to embed_tokens; set dora = false for it", exit_code=2
            )
        return LoraTiedHead(table, self.options)

    def _adapt_layer(self, name: str, layer: nn.Module, matching_names: list[str]) -> nn.Module:
        """Return the layer with an adapter; `matching_names` are the matching names of the layer or its parameters."""
        if any(parameter.requires_grad for parameter in layer.parameters()):
            raise UserError(f"adapters: {name} is named by two adapters; name it in one of them", exit_code=2)
        if isinstance(layer, Linear):
            return LoraLinear(layer, self.options)
        if self.dora:
            raise UserError(f"adapters: {name}: PEFT supports DoRA for linear layers only; set dora = false for it", 2)
        if isinstance(layer, Embedding):
            return LoraEmbedding(layer, self.options)
        if self.dropout:
            raise UserError(f"adapters: {name}: PEFT does not support dropout for experts; set dropout = 0 for them", 2)
        assert isinstance(layer, Experts)
        leaves = {matching_name.rpartition(".")[2] for matching_name in matching_names}
        return LoraExperts(layer, self.options, layer.matrices if name in matching_names else sorted(leaves))


def _list_matchable_names(name: str, layer: nn.Module) -> list[str]:
    """Return names for patterns to match: the layer's, its joined layer's, its parameters'; [] if unsupported."""
    if isinstance(layer, Experts):
        return [name, *(f"{name}.{leaf}" for leaf in layer.matrices)]
    if isinstance(layer, Linear) and layer.joined_name is not None:
        return [name, layer.joined_name]
    return [name] if type(layer) in (Linear, Embedding) or isinstance(layer, AdaptedLayer) else []
