"""Memory policy from plans: keep, recompute, offload or quantize, within limits."""

import tomllib
from collections.abc import Iterator
from functools import cached_property

import attrs

from drawloom import NodeView, Recipe, RecipeError, ResolvedRecipe, UserError, above, component, setting
from drawloom.components.planning.calibrate import load_local_device_model
from drawloom.components.planning.check import plan_run
from drawloom.components.planning.plan import plan
from drawloom.components.planning.search import describe_excess
from drawloom.components.planning.text import describe_memory_choice
from drawloom.graph.inspect.serialize import nest_groups, serialize_nodes
from drawloom.ports import Device, MemoryChoice, PassFeature, Processes, Program, run_log


@component(impact="safe")
class PlannedMemory(PassFeature):
    """
    The fastest planned memory use within limits, chosen before the run allocates.

    For each stage it chooses among keeping activations, recomputing them (activation checkpointing), offloading them to
    host memory, and with `quantize` keeping some in 8 bits; and for each rank, how much of the optimizer's state is in
    host memory, if the optimizer can stream it. Rates are the device model's. `drawloom plan` shows the choice and its
    cost.
    """

    recipe: ResolvedRecipe
    device: Device
    processes: Processes
    limit: float | None = setting(
        "bytes that a rank may use on its device; default: 92 % of its memory", default=None, check=above(0)
    )
    host_limit: float | None = setting(
        "bytes that a rank may use in host memory; default: its share of 85 % of the host's memory on a GPU",
        default=None,
        check=above(0),
    )
    quantize: bool = setting(
        "whether inputs of norms and gates may be kept in 8 bits, which rounds gradients; other choices are exact",
        default=False,
        impact="changes_training",
    )

    @classmethod
    def notes(cls, node: NodeView) -> Iterator[str]:
        """Yield the choice for this machine, or why it can't be made here."""
        try:
            planned = plan(Recipe.of(nest_groups(serialize_nodes(node.nodes))), load_local_device_model())
        except (UserError, RecipeError) as error:
            yield f"the choice can't be made here: {error}"
            return
        ranks = f"for {planned.ranks} rank{'s' * (planned.ranks > 1)} on {planned.device.name}"
        if planned.fits:
            yield f"{ranks}: {describe_memory_choice(planned)}; `drawloom plan --device` plans for other devices"
        else:
            yield f"{ranks} nothing fits; `drawloom plan` lists settings that would"

    def choose(self) -> MemoryChoice:
        return self._choice

    def change_program(self, program: Program) -> Program:
        """Return the program with the chosen stages' activations in host memory."""
        return attrs.evolve(program, offloaded=program.offloaded | self._choice.offloaded)

    @cached_property
    def _choice(self) -> MemoryChoice:
        recipe = Recipe.of(tomllib.loads(self.recipe.text))
        planned = plan_run(recipe, self.device, self.processes)
        if planned.choice is None or not planned.fits:
            raise UserError(describe_excess(recipe, planned))
        run_log.info("memory  %s", describe_memory_choice(planned))
        return planned.choice
