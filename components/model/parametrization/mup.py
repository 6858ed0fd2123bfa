"""The component `model.parametrization.mup`: the maximal update parametrization (Yang et al. 2022)."""

from drawloom import component
from drawloom.components.model.decoder.config import size_setting
from drawloom.components.model.parametrization.scaling import compute_model_scaling
from drawloom.ports import ModelScaling


@component(impact="incompatible")
class MuP:
    """Maximal update parametrization (muP): learning rates transfer over widths."""

    base_hidden_size: int = size_setting("hidden_size", "hidden_size of the tuned model")

    def compute_scaling_for_size(self, hidden_size: int, num_hidden_layers: int) -> ModelScaling:
        return compute_model_scaling(hidden_size / self.base_hidden_size)
