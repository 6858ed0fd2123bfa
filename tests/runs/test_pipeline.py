"""The same run in one process and over pipeline ranks."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from drawloom.components.checkpoint.reader import load_node
from drawloom.components.checkpoint.state_hashes import state_hashes
from drawloom.graph.registry.registry import Registry
from support.runs import drawloom, series, take_back, write_corpus

SCHEDULES = [name for name in Registry.of("drawloom.components").names() if name.startswith("pipeline.schedules.")]
COMMON = (
    "run",
    "tiny.toml",
    "model.num_hidden_layers=4",
    "batch.global_size=8",
    "batch.micro_size=1",
    "trainer.steps=6",
)
LEARNED = ("loss", "grad_norm", "validation_loss", "tokens")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus, the tiny recipe, and a run of it on one process."""
    folder = tmp_path_factory.mktemp("pipeline")
    write_corpus(folder)
    assert drawloom(folder, *COMMON, "run.name=one")[0].code == 0
    return folder


def assert_same(run: Path, other: Path) -> None:
    """Losses and gradient norms of every step are equal to 1e-6 relative."""
    ours, theirs = series(run, *LEARNED), series(other, *LEARNED)
    assert len(ours) == len(theirs) == 6
    for mine, yours in zip(ours, theirs, strict=True):
        assert [value or 0 for value in mine] == pytest.approx([value or 0 for value in yours], rel=1e-6)


def scheduled(name: str) -> list[str]:
    """The words that choose a schedule, and the executor that runs it."""
    executor = ["executor.use=pipeline.circular.executor"] if name == "circular" else []
    return [f"schedule.use=pipeline.schedules.{name}", *executor]


QUICK = ("gpipe", "zero_bubble_1p", "dual_pipe_v")  # test_executor.py compares steps of all of them


@pytest.mark.parametrize(
    "schedule",
    [pytest.param(name, marks=[] if name.endswith(QUICK) else [pytest.mark.soak]) for name in SCHEDULES],
)
def test_every_schedule_has_the_losses_of_one_process(place: Path, schedule: str) -> None:
    """Two ranks, with a tied embedding on both, train as one, for every schedule; export and sample too."""
    name = schedule.rpartition(".")[2]
    words = [*COMMON, f"run.name={name}", "mesh.pipeline=2", *scheduled(name)]
    outcomes = drawloom(place, *words, ranks=2)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert_same(place / "runs/one", place / "runs" / name)
    assert (place / "runs" / name / "sample.txt").read_bytes() == (place / "runs/one/sample.txt").read_bytes()
    assert (place / "runs" / name / "export/config.json").exists()


HELD = '''"""A final task that writes down which layers each stage holds."""

from pathlib import Path

from drawloom.components.ports.stages import Stages
from drawloom.graph import component


@component
class Held:
    """Which layers each stage holds."""

    stages: Stages

    def is_finished(self, step: int) -> bool:
        return False

    def finish(self, step: int) -> None:
        for stage in self.stages.local:
            layers = sorted({name.split(".")[2] for name, _ in stage.named_parameters() if ".layers." in name})
            Path(f"stage-{stage.index}.txt").write_text(" ".join(layers))
'''


def test_the_layers_that_auto_gives_a_stage_are_those_it_holds(place: Path) -> None:
    """With a last layer that costs three, the second rank has fewer layers; the losses are those of one process."""
    (place / "my_lab").mkdir()
    (place / "my_lab/__init__.py").write_text('"""Components of our own."""')
    (place / "my_lab/held.py").write_text(HELD)
    costs = ["schedule.slices=[1.0, 1.0, 1.0, 3.0]", "schedule.stages_per_rank=1", "schedule.trials=8"]
    words = [*COMMON, "run.name=cut", "mesh.pipeline=2", *scheduled("auto"), *costs, "--import", "my_lab"]
    held = 'trainer.on_finish=[{use = "my_lab.held"}]'
    outcomes = drawloom(place, *words, held, ranks=2, path=str(place))
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert [(place / f"stage-{stage}.txt").read_text() for stage in range(2)] == ["0 1 2", "3"]
    assert_same(place / "runs/one", place / "runs/cut")


def moved(place: Path, name: str, layouts: Sequence[int], *words: str) -> Path:
    """A run that resumes for some steps on each of these numbers of pipeline ranks."""
    often = 6 // len(layouts)
    common = [*COMMON, *words, f"run.name={name}", f"checkpoint.every={often}", "checkpoint.keep=9"]
    for number, ranks in enumerate(layouts):
        if number:
            take_back(place / "runs" / name, often * number)
        outcomes = drawloom(place, *common, f"mesh.pipeline={ranks}", ranks=ranks)
        assert {outcome.code for outcome in outcomes} == {0}, outcomes
    return place / "runs" / name


def test_a_run_resumes_on_another_pipeline_layout(place: Path) -> None:
    """A checkpoint of one rank resumes on two with the same losses, to rounding."""
    assert_same(place / "runs/one", moved(place, "tied", (1, 2)))


def test_a_run_without_tied_weights_resumes_bit_exactly_on_another_layout(place: Path) -> None:
    """With backward passes in one order, every metric, weight and moment is that of the run on one rank."""
    words = ("model.tie_word_embeddings=false", "trainer.on_finish=[]")
    assert drawloom(place, *COMMON, *words, "run.name=straight")[0].code == 0
    runs = moved(place, "to-and-fro", (1, 2, 1), *words), place / "runs/straight"
    assert series(runs[0], *LEARNED) == series(runs[1], *LEARNED)
    for node in ("stages", "optimizer"):
        states = [load_node(run / "checkpoints/step-6", node) for run in runs]
        ours, theirs = (state_hashes(dict(sorted(state.items()))) for state in states)
        assert ours == theirs and len(ours) > 30


def test_circular_runs_continue_in_other_recipes_and_their_own_bit_exactly(place: Path) -> None:
    """
    A run that stops and resumes has the bits of one that does not; a checkpoint moves to another executor and back.

    Checkpoint and export have every tensor under its usual name, as those of one rank.
    """
    run, files = place / "runs/round", ["checkpoint.every=2", "checkpoint.keep=9", "run.name=round"]
    words = [*COMMON, *files, "mesh.pipeline=2", *scheduled("circular")]

    def resumed(step: int, ranks: int, words: Sequence[str]) -> None:
        if step:
            take_back(run, step)
        outcomes = drawloom(place, *words, ranks=ranks)
        assert {outcome.code for outcome in outcomes} == {0}, outcomes

    resumed(0, 2, words)
    assert_same(place / "runs/one", run)
    learned, exported = series(run, *LEARNED), weights(run)
    resumed(4, 2, words)
    assert series(run, *LEARNED) == learned and weights(run) == exported
    resumed(2, 1, [*COMMON, *files])
    assert_same(place / "runs/one", run)
    resumed(4, 2, words)
    assert_same(place / "runs/one", run)
    names = [load_node(place / "runs" / name / "checkpoints/step-6", "stages").keys() for name in ("one", "round")]
    assert names[0] == names[1]


def weights(run: Path) -> list[bytes]:
    """The bytes of the exported weights."""
    return [path.read_bytes() for path in sorted((run / "export").glob("*.safetensors"))]


def test_commands_read_a_checkpoint_of_two_ranks(place: Path) -> None:
    """One process exports and samples from weights that two ranks saved."""
    words = [*COMMON, "run.name=parts", "mesh.pipeline=2", "trainer.steps=2", "trainer.on_finish=[]"]
    drawloom(place, *words, ranks=2)
    exported = drawloom(place, "export", "runs/parts", "--to", "whole")[0]
    assert exported.code == 0 and (place / "whole/model.safetensors").exists(), exported
    assert drawloom(place, "generate", "runs/parts", "--prompt", "def", "--tokens", "3")[0].text.startswith("def")


SPARSE = """
extends = "./tiny.toml"

[model]
use = "model.qwen3.moe"
num_hidden_layers = 4
hidden_size = 16
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 8
num_experts = 4
num_experts_per_tok = 2
moe_intermediate_size = 16
intermediate_size = 32
mlp_only_layers = [2]
router_aux_loss_coef = 0.1
tie_word_embeddings = true
"""


def test_a_model_with_experts_has_the_losses_of_one_process(place: Path) -> None:
    """A mixture of experts trains over two ranks as over one, with auxiliary loss, export and sample."""
    (place / "sparse.toml").write_text(SPARSE, "utf-8")
    common = ["run", "sparse.toml", "batch.global_size=8", "trainer.steps=6"]
    assert drawloom(place, *common, "run.name=one_sparse", "batch.micro_size=8")[0].code == 0
    words = ["batch.micro_size=1", "run.name=sparse", "mesh.pipeline=2"]
    outcomes = drawloom(place, *common, *words, "schedule.use=pipeline.schedules.zero_bubble_1p", ranks=2)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    run, one = place / "runs/sparse", place / "runs/one_sparse"
    assert_same(one, run)
    assert (run / "sample.txt").read_bytes() == (one / "sample.txt").read_bytes()
    assert (run / "export/config.json").read_text() == (one / "export/config.json").read_text()
    assert drawloom(place, "generate", str(run), "--prompt", "def", "--tokens", "3")[0].text.startswith("def")
