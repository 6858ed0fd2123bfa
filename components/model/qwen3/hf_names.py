"""
Parameters in memory and in Hugging Face's files.

Names are the same, but for experts: in memory a parameter holds those of a layer, as in transformers 5; files, also
those that transformers writes, have a matrix for each projection of each expert.
"""

from collections.abc import Iterable, Iterator

from drawloom.components.ports.weights import Mapper
from drawloom.components.weights.mapper import parallel, sequential
from drawloom.components.weights.mapper_ops import chunk, identity, unstack


def mapper_of(names: Iterable[str], num_experts: int) -> Mapper:
    """From the parameters of these names to the tensors in files; `num_experts` are those of a layer, if it has any."""
    return parallel(*(_mapper_of(name, num_experts) for name in names))


def _mapper_of(name: str, num_experts: int) -> Mapper:
    layer, _, projection = name.rpartition(".")
    experts = [f"{layer}.{expert}" for expert in range(num_experts)]
    if name.endswith(".experts.gate_up_proj"):
        return sequential(unstack(name, experts), parallel(*_halves(experts)))
    if name.endswith(".experts.down_proj"):
        return unstack(name, [f"{expert}.{projection}.weight" for expert in experts])
    return identity(name)


def _halves(experts: Iterable[str]) -> Iterator[Mapper]:
    for expert in experts:
        yield chunk(expert, [f"{expert}.gate_proj.weight", f"{expert}.up_proj.weight"])
