"""The component `model.parametrization.completep`: CompleteP (Dey et al. 2025)."""

from drawloom import component, setting
from drawloom.components.model.decoder.config import create_size_check
from drawloom.components.model.parametrization.scaling import compute_model_scaling
from drawloom.ports import ModelScaling


@component(impact="incompatible")
class CompleteP:
    """CompleteP: muP with residual outputs divided by the depth; learning rates transfer over widths and depths."""

    base_hidden_size: int = setting("hidden_size of the tuned model", check=create_size_check("hidden_size"))
    base_num_hidden_layers: int = setting(
        "num_hidden_layers of the tuned model", check=create_size_check("num_hidden_layers")
    )

    def compute_scaling_for_size(self, hidden_size: int, num_hidden_layers: int) -> ModelScaling:
        return compute_model_scaling(
            hidden_size / self.base_hidden_size, num_hidden_layers / self.base_num_hidden_layers
        )
