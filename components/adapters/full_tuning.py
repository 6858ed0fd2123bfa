"""Full fine-tuning for named parts in an otherwise frozen model."""

from collections.abc import Collection, Iterator
from typing import ClassVar

from torch import nn

from drawloom import UserError, component, setting
from drawloom.components.adapters.lora_layers import LoraTiedHead
from drawloom.components.adapters.targets import find_pattern_fault, list_matching_patterns
from drawloom.components.weights.adapted import EMBEDDING
from drawloom.ports import AdaptedLayer


@component
class FullTuning:
    """Full fine-tuning for some model parameters, alone or together with other adapters."""

    thaws: ClassVar[bool] = True

    targets: list[str] = setting(
        'patterns for module or parameter names in transformers, or their ends: "norm", "layers.0", '
        '"*layernorm.weight"',
        check=find_pattern_fault,
        impact="incompatible",
    )

    def adapt_and_list_matched_targets(self, module: nn.Module) -> Collection[str]:
        """
        Thaw the parameters matching a pattern; return the patterns that matched.

        Raises UserError for a parameter in a layer with an adapter.
        """
        matched: set[str] = set()
        layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, AdaptedLayer)}
        # An adapter of a tied head adapts the embedding's table.
        tables = [EMBEDDING] if any(isinstance(layer, LoraTiedHead) for layer in layers.values()) else []
        adapted = tuple(f"{name}." for name in (*layers, *tables))
        for name, parameter in module.named_parameters():
            targets = {
                target
                for prefix in _list_name_and_enclosing_modules(name)
                for target in list_matching_patterns(prefix, self.targets)
            }
            if targets and name.startswith(adapted):
                owner = name.rpartition(".")[0]
                raise UserError(f"adapters: {owner} is named by two adapters; name it in one of them", exit_code=2)
            if targets:
                parameter.requires_grad_()
                matched |= targets
        return matched


def _list_name_and_enclosing_modules(name: str) -> Iterator[str]:
    """Yield a parameter's name and the names of all modules around it."""
    while name:
        yield name
        name = name.rpartition(".")[0]
