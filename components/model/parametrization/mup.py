"""The component `model.parametrization.mup`: the maximal update parametrization (Yang et al. 2022)."""

from drawloom import component, setting
from drawloom.components.model.decoder.config import create_size_check
from drawloom.components.model.parametrization.scaling import compute_model_scaling
from drawloom.ports import ModelScaling


@component(impact="incompatible")
class MuP:
    """Maximal update parametrization (muP): learning rates transfer over widths."""

    base_hidden_size: int = setting("hidden_size of the tuned model", check=create_size_check("hidden_size"))

    def compute_scaling_for_size(self, hidden_size: int, num_hidden_layers: int) -> ModelScaling:
        return compute_model_scaling(hidden_size / self.base_hidden_size)
