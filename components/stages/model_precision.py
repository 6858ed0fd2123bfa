"""Precision of a model with parameters that its layers use in the parameter dtype."""

from collections.abc import Sequence

import attrs
import torch

from drawloom.ports import Model, Precision, UncastParameters


@attrs.frozen
class ModelPrecision:
    """Recipe's precision whose `uncast` also includes the model's own patterns."""

    recipe: Precision
    by_model: tuple[str, ...]

    @property
    def parameter(self) -> torch.dtype:
        return self.recipe.parameter

    @property
    def compute(self) -> torch.dtype:
        return self.recipe.compute

    @property
    def gradient(self) -> torch.dtype:
        return self.recipe.gradient

    @property
    def reduce(self) -> torch.dtype:
        return self.recipe.reduce

    @property
    def uncast(self) -> Sequence[str]:
        return (*self.recipe.uncast, *self.by_model)


def add_model_uncast_patterns(recipe: Precision, model: Model) -> Precision:
    """Return the recipe's precision, with the model's own patterns if it has some."""
    patterns = tuple(model.uncast_parameter_patterns()) if isinstance(model, UncastParameters) else ()
    return ModelPrecision(recipe, patterns) if patterns else recipe
