"""Builder for dense decoders with an optional parametrization, such as muP."""

from collections.abc import Iterator
from typing import Any, ClassVar

from drawloom.components.model.decoder.builder import DecoderBuilder
from drawloom.components.model.decoder.config import DecoderConfig
from drawloom.components.ports.parameter_roles import ModelScaling, Parametrization
from drawloom.graph import Problem, component_base_class


@component_base_class
class ParametrizedBuilder(DecoderBuilder):
    """
    Builder for a pre-norm decoder without experts, whose initial values and learning rates a parametrization may scale.

    Multipliers of residual outputs and logits are folded into weights, so an export needs no keys for them.
    """

    has_multipliers: ClassVar[bool] = False
    """Whether the family's config has multipliers of residual outputs and logits, which a tied head requires."""

    parametrization: Parametrization | None = None

    @classmethod
    def constraints(cls, node: Any) -> Iterator[Problem]:
        """Yield the family's problems, and problems of a parametrization with a file's sizes or with a tied head."""
        yield from super().constraints(node)
        if node.neighbour("parametrization") is None:
            return
        if node.settings["config"] is not None:
            text = "a parametrization scales factors that the file may have scaled already"
            yield node.problem("config", text, "write the sizes in the recipe, or remove the parametrization")
        if node.settings["tie_word_embeddings"] and not cls.has_multipliers:
            text = f"a parametrization scales embedding and head differently, and {node.use} has no factor for logits"
            yield node.problem("tie_word_embeddings", text, "write false, or use = 'model.granite'")

    @property
    def scaling(self) -> ModelScaling:
        scaling = self.compute_scaling(self.architecture)
        return scaling if self.has_multipliers else scaling.fold_multipliers()

    def compute_scaling(self, config: DecoderConfig) -> ModelScaling:
        """Return the parametrization's factors for a config's sizes; all are 1 without a parametrization."""
        if self.parametrization is None:
            return ModelScaling()
        return self.parametrization.compute_scaling_for_size(config.hidden_size, config.num_hidden_layers)
