"""Tensors through mappers: order, cost, and specs before reading."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import attrs
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from drawloom.components.storage.tensor_source import TensorSpec
from drawloom.components.weights.load import compute_group_output_specs, convert_tensors, stream_converted_tensors
from drawloom.components.weights.mapper import chunk, identity, parallel, sequential, stack, transpose, unstack
from support.tensor_sources import InMemoryTensors


@attrs.frozen
class Watched:
    """A source that records the tensors it reads."""

    source: InMemoryTensors
    log: list[str]

    def specs(self) -> Mapping[str, TensorSpec]:
        return self.source.specs()

    def tensor(self, name: str) -> Tensor:
        self.log.append(f"read {name}")
        return self.source.tensor(name)


def test_groups_come_one_by_one() -> None:
    """A group is read when its first tensor is asked for, in the order of the mapper, and never before."""
    log: list[str] = []
    mapper = parallel(stack(["c", "a"], "ca"), unstack("d", ["e", "f"]), identity("b"))
    source = Watched(InMemoryTensors({name: torch.ones(2) for name in "abcd"}), log)
    for name, _ in stream_converted_tensors(source, mapper):
        log.append(f"gave {name}")
    assert log == ["read c", "read a", "gave ca", "read d", "gave e", "gave f", "read b", "gave b"]


def test_tensors_that_the_mapper_does_not_take_are_left_out() -> None:
    """Tensors unknown to a mapper do not come out; a needed one must be there."""
    assert convert_tensors(identity("a"), {"a": torch.ones(1), "b": torch.ones(1)}).keys() == {"a"}
    with pytest.raises(KeyError, match="a"):
        convert_tensors(identity("a"), {"b": torch.ones(1)})


def test_nothing_needs_gradients() -> None:
    """Parameters are converted without a graph behind the results."""
    made = convert_tensors(stack(["a", "b"], "c"), {name: torch.ones(2, requires_grad=True) for name in "ab"})
    assert not made["c"].requires_grad


def test_specs_are_known_before_reading() -> None:
    """The announced shapes and dtypes are the delivered ones."""
    kinds = {"qkv": TensorSpec((8, 4), torch.bfloat16)}
    mapper = sequential(chunk("qkv", ["q", "k", "v"], 0, [4, 2, 2]), transpose("k", 0, 1))
    expected = {"q": (4, 4), "k": (4, 2), "v": (2, 4)}
    assert compute_group_output_specs(mapper.groups[0], kinds) == {
        n: TensorSpec(s, torch.bfloat16) for n, s in expected.items()
    }


def test_specs_that_do_not_fit_a_group_are_reported() -> None:
    """An impossible conversion is reported without reading, with the names on both sides."""
    kinds = {"a": TensorSpec((3,), torch.float32)}
    with pytest.raises(ValueError, match="b, c can't be made of a: dimension 0 has size 3"):
        compute_group_output_specs(chunk("a", ["b", "c"]).groups[0], kinds)


MEASURE = """
import sys
from pathlib import Path
import torch
from drawloom.components.weights.load import stream_converted_tensors
from drawloom.components.weights.mapper import stack, identity
from drawloom.components.weights.mapper import parallel
from drawloom.components.storage.safetensors.reader import open_safetensors_folder

def status(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))

torch.set_num_threads(1)
names = [f"t{n}" for n in range(32)]
mapper = parallel(stack(names[:4], "four"), identity(*names[4:]))
source = open_safetensors_folder(Path(sys.argv[1]))
torch.stack([source.tensor("t0")[:9]] * 2).numel()  # brings in the code
Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
before = status("VmRSS")
total = sum(tensor.numel() for _, tensor in stream_converted_tensors(source, mapper))
print(total, status("VmHWM") - before)
"""


def test_peak_is_the_largest_group_not_the_file(tmp_path: Path) -> None:
    """Reading a file of 128 MB whose largest group is 16 MB takes the group, its result, and some MB."""
    save_file({f"t{n}": torch.zeros(2**20) for n in range(32)}, tmp_path / "model.safetensors")
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    source = str(Path(__file__).parents[3] / "src")
    process = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONPATH": source})
    total, peak = map(int, process.stdout.split())
    assert total == 32 * 2**20
    assert peak < 2 * 4 * 4 * 2**20 + 24 * 2**20  # code that the system reads in again counts too, some MB of it
