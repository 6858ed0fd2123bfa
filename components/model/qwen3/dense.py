"""The component `model.qwen3.dense`."""

from torch import nn

from drawloom.components.model.qwen3.builder import Qwen3Builder
from drawloom.components.model.qwen3.decoder_layer import SwiGLU
from drawloom.components.model.qwen3.hugging_face import DENSE
from drawloom.graph import component


@component(impact="incompatible")
class Qwen3Dense(Qwen3Builder):
    """A Qwen3 dense language model, of sizes given here or by a Hugging Face `config.json`."""

    family = DENSE

    def mlp_of(self, number: int) -> nn.Module:
        return SwiGLU(self.architecture, self.kernels)
