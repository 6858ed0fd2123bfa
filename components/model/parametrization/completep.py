"""The component `model.parametrization.completep`: CompleteP (Dey et al. 2025)."""

from drawloom import component
from drawloom.components.model.decoder.config import size_setting
from drawloom.components.model.parametrization.scaling import compute_model_scaling
from drawloom.ports import ModelScaling


@component(impact="incompatible")
class CompleteP:
    """CompleteP: muP with residual outputs divided by the depth; learning rates transfer over widths and depths."""

    base_hidden_size: int = size_setting("hidden_size", "hidden_size of the tuned model")
    base_num_hidden_layers: int = size_setting("num_hidden_layers", "num_hidden_layers of the tuned model")

    def compute_scaling_for_size(self, hidden_size: int, num_hidden_layers: int) -> ModelScaling:
        return compute_model_scaling(
            hidden_size / self.base_hidden_size, num_hidden_layers / self.base_num_hidden_layers
        )
