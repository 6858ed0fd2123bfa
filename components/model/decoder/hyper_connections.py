"""
Hyper-connections: several residual streams; learned weights read, write and mix them (arXiv 2409.19606).

Between layers the streams are joined to one tensor: (..., streams * hidden_size). mHC (Xie et al. 2025, arXiv
2512.24880) constrains the weights, so that mixing streams keeps their sum.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from drawloom.components.model.decoder.branch_specs import ConnectedBranch, ConnectionSpec
from drawloom.components.model.decoder.config import DecoderConfig
from drawloom.components.model.decoder.layer import Block
from drawloom.components.model.decoder.model import Decoder
from drawloom.components.model.decoder.specs import LayerContext
from drawloom.components.model.layers import RMSNorm
from drawloom.ports import Kernels, LayerRange, Role


class HyperConnection(nn.Module):
    """
    Weights between a branch and residual streams: a static part, and one that depends on the streams.

    At the start a branch reads stream `first` and writes to all streams, and none are mixed: they equal a plain
    residual stream. Parameters are differences from this.

    With mHC, weights to read are between 0 and 1, weights to write between 0 and 2, and rows and columns of mixing
    weights add up to 1 (Sinkhorn-Knopp). At the start weights to read add up to 1, most of it for stream `first`.
    """

    def __init__(self, architecture: DecoderConfig, spec: ConnectionSpec, kernels: Kernels) -> None:
        super().__init__()
        count, self.spec, self.width, self.kernels = spec.streams, spec, architecture.hidden_size, kernels
        outputs, inputs, scales = self.projection_sizes
        self.norm = RMSNorm(inputs, architecture.rms_norm_eps, kernels)
        self.read, self.write = (nn.Parameter(torch.zeros(count)) for _ in range(2))
        self.mix = nn.Parameter(torch.zeros(count, count))
        self.projection = nn.Parameter(torch.zeros(outputs, inputs))
        self.scale = nn.Parameter(torch.full((scales,), 0.01))

    @property
    def projection_sizes(self) -> tuple[int, int, int]:
        """The projection's outputs and inputs, and how many scales its outputs have."""
        count = self.spec.streams
        return (count * (2 + count), count * self.width, 3) if self.spec.is_constrained else (2 + count, self.width, 2)

    def forward(self, streams: Tensor, output: Tensor | None, before: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """
        Write the last branch's output (..., width), if any, with its weights `before`, and read this branch's input.

        streams: (..., streams, width). Weights are at least float32.
        """
        # A norm's weight may multiply the projection's inputs as well as the streams.
        projection = (self.projection * self.norm.weight).to(streams.dtype)
        parameters = projection, self.read, self.write, self.mix, self.scale
        connection = *parameters, self.norm.eps, self.spec.first, self.spec.is_constrained
        return self.kernels.connect_streams(streams, output, before, connection)

    def parameter_roles(self) -> Mapping[str, Role]:
        # Every channel is multiplied by the weights to read and to mix, and all channels by the projection.
        uses = self.spec.streams * self.width // self.projection.shape[1]
        products = {"read": self.width, "mix": self.width, "write": 0, "projection": uses}
        return {name: Role(False, 0.0, count) for name, count in products.items()} | {"scale": Role(False, 0.01)}


class HyperBlock(Block):
    """A layer on several residual streams; it begins them if its input is one stream."""

    def __init__(self, architecture: DecoderConfig, branches: Sequence[ConnectedBranch], kernels: Kernels) -> None:
        super().__init__(architecture, branches, kernels)
        self.width, self.streams = architecture.hidden_size, branches[0].connection.streams
        for branch in branches:
            self.add_module(f"{branch.name}_connection", branch.connection.build(architecture, kernels))

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """Map hidden states (..., hidden_size), or joined streams (..., streams * hidden_size), to joined streams."""
        streams = torch.unflatten(hidden, -1, (-1, self.width))
        streams = streams.expand(*streams.shape[:-2], self.streams, self.width)
        output = weights = None
        for branch in self.branches:
            connection = self.get_submodule(f"{branch.name}_connection")
            streams, inputs, weights = connection(streams, output, weights)
            output = self.get_submodule(branch.name)(self.add_and_norm(None, inputs, branch).normed, context)
        return torch.flatten(self.kernels.connect_streams(streams, output, weights, None)[0], -2)


class StreamNorm(RMSNorm):
    """RMSNorm after averaging joined streams, (..., streams * width)."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the streams' mean, (..., width); their sum, as in the paper, has the same norm."""
        return super().forward(torch.unflatten(x, -1, (-1, self.weight.shape[0])).mean(-2))


class HyperDecoder(Decoder):
    """Decoder with a last norm that averages streams."""

    def __init__(self, architecture: DecoderConfig, span: LayerRange, kernels: Kernels) -> None:
        super().__init__(architecture, span, kernels)
        if span.head:
            self.norm = StreamNorm(architecture.hidden_size, architecture.rms_norm_eps, kernels)
