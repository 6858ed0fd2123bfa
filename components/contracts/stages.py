"""What everything that holds stages does."""

from drawloom.components.ports.model import Stages
from drawloom.graph.testing import expect


def stages_are_real_and_in_order(stages: Stages) -> None:
    """This rank has stages, in order, each of the same number, with modules off the meta device."""
    numbers = [stage.index for stage in stages.local]
    expect(numbers and numbers == sorted(set(numbers)), f"this rank's stages are {numbers}")
    expect(len({stage.count for stage in stages.local}) == 1, "stages disagree on how many there are")
    for stage in stages.local:
        expect(0 <= stage.index < stage.count, f"stage {stage.index} is none of {stage.count}")
        expect(
            not any(parameter.is_meta for parameter in stage.module.parameters()), f"stage {stage.index} is not real"
        )
