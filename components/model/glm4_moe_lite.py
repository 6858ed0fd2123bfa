"""The component `model.glm4_moe_lite`: GLM-4.7-Flash."""

from drawloom.components.model.deepseek_v3 import GLM4_MOE_LITE, DeepseekV3
from drawloom.graph import component


@component(impact="incompatible")
class Glm4MoeLite(DeepseekV3):
    """A GLM-4.7-Flash language model: DeepSeek-V3's layers with other sizes."""

    family = GLM4_MOE_LITE
