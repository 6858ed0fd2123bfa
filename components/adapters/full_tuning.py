"""Full tuning of named parts of a model that is frozen otherwise."""

from collections.abc import Collection, Iterator
from typing import ClassVar

from torch import nn

from drawloom.components.adapters.targets import matching, no_pattern
from drawloom.components.adapters.tied_head import LoraTiedHead
from drawloom.components.ports.adapters import AdaptedLayer
from drawloom.components.weights.adapted import EMBEDDING
from drawloom.graph import UserError, component, setting


@component
class FullTuning:
    """Trains some of the model's own parameters, beside other adapters or alone."""

    thaws: ClassVar[bool] = True

    targets: list[str] = setting(
        check=no_pattern,
        impact="incompatible",
        doc='names of modules or parameters in transformers, or ends of names, as patterns: "norm", "layers.0", '
        '"*layernorm.weight"',
    )

    def inject(self, module: nn.Module) -> Collection[str]:
        """Thaw the parameters that a pattern matches. Raises UserError for one of a layer that has an adapter."""
        found: set[str] = set()
        layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, AdaptedLayer)}
        # The table of a tied head with factors is the embedding's.
        tables = [EMBEDDING] if any(isinstance(layer, LoraTiedHead) for layer in layers.values()) else []
        adapted = tuple(f"{name}." for name in (*layers, *tables))
        for name, parameter in module.named_parameters():
            targets = {target for each in _ends(name) for target in matching(each, self.targets)}
            if targets and name.startswith(adapted):
                owner = name.rpartition(".")[0]
                raise UserError(f"adapters: {owner} is named by two adapters; name it in one of them", exit_code=2)
            if targets:
                parameter.requires_grad_()
                found |= targets
        return found


def _ends(name: str) -> Iterator[str]:
    """The name of a parameter, and those of all modules that hold it."""
    while name:
        yield name
        name = name.rpartition(".")[0]
