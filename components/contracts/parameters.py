"""What everything that holds parameters does."""

from torch import nn

from drawloom.components.ports.model import Parameters
from drawloom.graph.testing import expect


def each_is_named_once(parameters: Parameters) -> None:
    """Every parameter has one name, in the same order whenever it is asked for; none is left on the meta device."""
    named = parameters.named()
    expect(named, "there is nothing to train")
    expect(len({name for name, _ in named}) == len(named), "two parameters have one name")
    expect(len({id(parameter) for _, parameter in named}) == len(named), "a parameter has two names")
    expect([name for name, _ in parameters.named()] == [name for name, _ in named], "the order changes")
    for name, parameter in named:
        expect(isinstance(parameter, nn.Parameter) and not parameter.is_meta, f"{name} is not made real")
