"""All stages' activations in host memory; see `runtime/offloads.py`."""

from collections.abc import Mapping
from typing import ClassVar

import attrs

from drawloom import component
from drawloom.ports import PassFeature, Program


@component(impact="safe")
class OffloadedActivations(PassFeature):
    """
    Activations in host memory between a microbatch's forward and backward pass, if two or more passes are in between.

    A schedule or a memory policy may choose the stages instead.
    """

    excludes: ClassVar[Mapping[str, str]] = {
        "planning.memory": "the policy chooses what is kept, recomputed and offloaded"
    }

    def change_program(self, program: Program) -> Program:
        return attrs.evolve(program, offloaded=frozenset(range(program.stages)))
