"""A stage's costs, composed from recordings of one block of each kind."""

from typing import Any

import pytest

from drawloom import Recipe
from drawloom.components.distributed.device_model import find_device_model
from drawloom.components.planning import stage_costs
from drawloom.components.planning.plan import plan
from drawloom.components.planning.stage_costs import StageCostRecorder, StageCosts
from support.family_words import FAMILY_WORDS

SMALL = ("model.hidden_size=32", "model.num_attention_heads=2", "model.num_key_value_heads=1", "model.head_dim=16")
SPLIT = ("mesh.pipeline=2", "batch.micro_size=1", "schedule.use=pipeline.schedules.zero_bubble_1p")
LINKED = ("model.num_kv_shared_layers=2", "model.hidden_size_per_layer_input=8")
CASES = {
    "kept": ("first_run", "none", 4, ()),
    "selective": ("first_run", "selective", 4, ()),
    "quantized": ("first_run", "quantized", 4, ()),
    "all": ("first_run", "blocks", 4, ()),
    "one of two, the last kept": ("first_run", "2", 4, ()),
    "one of two, the last recomputed": ("first_run", "2", 5, ()),
    "one of three, two kept at the end": ("first_run", "3", 6, ()),
    "experts": ("moe", "2", 4, ("model.num_experts=4", "model.moe_intermediate_size=32")),
    **{family: ("first_run", "2", 4, words) for family, words in FAMILY_WORDS.items()},
    "linked layers": ("first_run", "2", 4, (*FAMILY_WORDS["gemma4"], *LINKED)),
    "in two parts": ("pipeline", "none", 8, SPLIT),
    "in two parts, one of two": ("pipeline", "2", 8, SPLIT),
    "in two parts, all": ("pipeline", "blocks", 6, SPLIT),
}


ALIKE = ("deepseek_v2", "deepseek_v32", "glm4_moe", "olmo3", "qwen3_5", "qwen3_5_moe", "smollm3")
"""Families whose blocks occur in other cases, too."""


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.soak] * (case in ALIKE)) for case in CASES])
def test_a_stage_costs_as_much_as_a_recording_of_all_its_blocks(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Bytes, their peaks and seconds equal the whole stage's, pass by pass. An input pass that recomputes has a peak at
    most 2 % higher: it depends on the recomputed blocks.
    """
    recipe, policy, layers, words = CASES[case]
    compose, asked = StageCostRecorder.record_costs, []

    def record_costs(self: StageCostRecorder, stage: Any, split: bool) -> StageCosts:
        composed = compose(self, stage, split)
        asked.append((self, stage, split, composed))
        return composed

    monkeypatch.setattr(StageCostRecorder, "record_costs", record_costs)
    more = (f"model.num_hidden_layers={layers}", f"stages.recompute={policy}", "vars.length=64", "device.kind=cpu")
    plan(Recipe.load(recipe, *SMALL, *more, *words), find_device_model("h100"))
    assert asked
    for meter, stage, split, composed in asked:
        blocks = [
            stage_costs._Block(number, stage_costs._is_recomputed(stage.recompute, number), number)
            for number, _ in enumerate(meter.blocks(stage.module))
        ]
        whole = meter._record_passes_with_only_blocks(stage, blocks, split)
        assert composed.passes.keys() == whole.keys() and ("I" in whole) is ("mesh.pipeline=2" in words)
        for op, part in whole.items():
            planned = composed.passes[op]
            assert (planned.total_kept_bytes, planned.net_delta, planned.flops) == (
                part.total_kept_bytes,
                part.net_delta,
                part.flops,
            ), op
            assert part.peak_delta <= planned.peak_delta <= part.peak_delta * (1.02 if op == "I" else 1.0), op
            assert op in "FW" or planned.last_delta == part.last_delta, op
            assert planned.seconds == pytest.approx(part.seconds), op
