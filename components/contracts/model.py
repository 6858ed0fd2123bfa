"""What every model does."""

import torch

from drawloom.components.ports.model import LayerRange, Model
from drawloom.graph.testing import expect


def _names(model: Model, span: LayerRange) -> list[str]:
    with torch.device("meta"):
        return [name for name, _ in model.build(span).named_parameters()]


def parts_make_the_whole(model: Model) -> None:
    """However the layers are split, parameters have the same names, and each is in some part."""
    whole = set(_names(model, LayerRange(0, model.num_hidden_layers, True, True)))
    for cut in range(1, model.num_hidden_layers):
        first = _names(model, LayerRange(0, cut, True, False))
        last = _names(model, LayerRange(cut, model.num_hidden_layers, False, True))
        expect(set(first) | set(last) == whole, f"split before layer {cut}, some parameters have other names")


def values_follow_from_name_shape_and_seed(one: Model, other: Model) -> None:
    """A parameter begins the same wherever it is made, and otherwise with another seed."""
    with torch.device("meta"):
        shapes = {
            name: p.shape for name, p in one.build(LayerRange(0, one.num_hidden_layers, True, True)).named_parameters()
        }
    differ = False
    for name, shape in shapes.items():
        first, again, otherwise = torch.empty(shape), torch.empty(shape), torch.empty(shape)
        one.initialise(name, first, 1)
        other.initialise(name, again, 1)
        other.initialise(name, otherwise, 2)
        expect(torch.equal(first, again), f"{name} begins otherwise in another that is made alike")
        expect(torch.isfinite(first).all(), f"{name} begins with what is no finite number")
        differ |= not torch.equal(first, otherwise)
    expect(differ, "the seed changes nothing")
