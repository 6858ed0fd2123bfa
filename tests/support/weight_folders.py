"""Modules filled from folders."""

from pathlib import Path

from torch import nn

from drawloom.components.ports.weights import Mapper
from drawloom.components.weights.load import fill_module, open_and_check_folder


def fill_module_from_folder(folder: Path, module: nn.Module, mapper: Mapper) -> None:
    """Fill a module on the CPU from a folder, after checking the files' headers, as stages do."""
    fill_module(open_and_check_folder(folder, module, mapper), module, mapper)
