"""Which tensors of a module are its state."""

from torch import Tensor, nn


def persistent_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by their names, each tensor once, as the module holds them."""
    saved = module.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in saved}
    return {**dict(module.named_parameters()), **buffers}
