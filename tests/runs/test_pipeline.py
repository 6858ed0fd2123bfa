"""The same run in one process and over pipeline ranks."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from drawloom.components.checkpoint.reader import load_node_state
from drawloom.components.checkpoint.state_hashes import hash_states
from drawloom.graph.registry.registry import Registry
from support.runs import drawloom, series, take_back, write_corpus

SCHEDULES = [
    name for name in Registry.from_package("drawloom.components").names() if name.startswith("pipeline.schedules.")
]
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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a corpus, the tiny recipe, and its run on one process."""
    folder = tmp_path_factory.mktemp("pipeline")
    write_corpus(folder)
    assert drawloom(folder, *COMMON, "run.name=one")[0].code == 0
    return folder


def assert_same(run: Path, other: Path) -> None:
    """Assert that losses and gradient norms of every step are equal to 1e-6 relative."""
    ours, theirs = series(run, *LEARNED), series(other, *LEARNED)
    assert len(ours) == len(theirs) == 6
    for our_values, their_values in zip(ours, theirs, strict=True):
        assert [value or 0 for value in our_values] == pytest.approx([value or 0 for value in their_values], rel=1e-6)


def schedule_words(name: str) -> list[str]:
    """Return the words that choose a schedule and its executor."""
    executor = ["executor.use=pipeline.circular.executor"] if name == "circular" else []
    return [f"schedule.use=pipeline.schedules.{name}", *executor]


OFFLOADING = ("gpipe", "zero_bubble_1p", "zero_bubble_v", "interleaved_1f1b")
QUICK = ("zero_bubble_1p", "dual_pipe_v")  # test_executor.py compares steps of all schedules


@pytest.mark.parametrize(
    "schedule",
    [pytest.param(name, marks=[] if name.endswith(QUICK) else [pytest.mark.soak]) for name in SCHEDULES],
)
def test_every_schedule_has_the_losses_of_one_process(folder: Path, schedule: str) -> None:
    """Two ranks with a tied embedding have the losses, the export and the sample of one process; some offload."""
    name = schedule.rpartition(".")[2]
    offload = ["offload.use=pipeline.offloaded"] * (name in OFFLOADING)
    words = [*COMMON, f"run.name={name}", "mesh.pipeline=2", *offload, *schedule_words(name)]
    outcomes = drawloom(folder, *words, ranks=2)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert_same(folder / "runs/one", folder / "runs" / name)
    assert (folder / "runs" / name / "sample.txt").read_bytes() == (folder / "runs/one/sample.txt").read_bytes()
    assert (folder / "runs" / name / "export/config.json").exists()


LAYER_FILES = '''"""A final task that writes the layers of all stages to files."""

from pathlib import Path

from drawloom.components.ports.stages import Stages
from drawloom.graph import component


@component
class LayerFiles:
    """Final task that writes a file of layer numbers per stage."""

    stages: Stages

    def has_result_of_step(self, step: int) -> bool:
        return False

    def run_after_training(self, step: int) -> None:
        for stage in self.stages.local:
            names = [name for name, _ in stage.named_masters_or_parameters() if ".layers." in name]
            layers = sorted({name.split(".")[2] for name in names})
            Path(f"stage-{stage.index}.txt").write_text(" ".join(layers))
'''


def test_stages_have_the_layers_that_auto_assigned(folder: Path) -> None:
    """If the last layer costs three, the second rank has fewer layers, and losses equal one process's."""
    (folder / "my_lab").mkdir()
    (folder / "my_lab/__init__.py").write_text('"""Components of our own."""')
    (folder / "my_lab/layer_files.py").write_text(LAYER_FILES)
    costs = ["schedule.slices=[1.0, 1.0, 1.0, 3.0]", "schedule.stages_per_rank=1", "schedule.trials=8"]
    words = [*COMMON, "run.name=cut", "mesh.pipeline=2", *schedule_words("auto"), *costs, "--import", "my_lab"]
    final_task = 'trainer.on_finish=[{use = "my_lab.layer_files"}]'
    outcomes = drawloom(folder, *words, final_task, ranks=2, path=str(folder))
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert [(folder / f"stage-{stage}.txt").read_text() for stage in range(2)] == ["0 1 2", "3"]
    assert_same(folder / "runs/one", folder / "runs/cut")


def run_on_layouts(folder: Path, name: str, layouts: Sequence[int], *words: str) -> Path:
    """Run some steps on each number of pipeline ranks in turn, and return the run folder."""
    interval = 6 // len(layouts)
    common = [*COMMON, *words, f"run.name={name}", f"checkpoint.every={interval}", "checkpoint.keep=9"]
    for number, ranks in enumerate(layouts):
        if number:
            take_back(folder / "runs" / name, interval * number)
        outcomes = drawloom(folder, *common, f"mesh.pipeline={ranks}", ranks=ranks)
        assert {outcome.code for outcome in outcomes} == {0}, outcomes
    return folder / "runs" / name


def test_a_run_resumes_on_another_pipeline_layout(folder: Path) -> None:
    """A checkpoint of one rank resumes on two with the same losses, to rounding."""
    assert_same(folder / "runs/one", run_on_layouts(folder, "tied", (1, 2)))


def test_a_run_without_tied_weights_resumes_bit_exactly_on_another_layout(folder: Path) -> None:
    """Without tied weights, all metrics, weights and moments equal the run's on one rank."""
    words = ("model.tie_word_embeddings=false", "trainer.on_finish=[]")
    assert drawloom(folder, *COMMON, *words, "run.name=straight")[0].code == 0
    runs = run_on_layouts(folder, "to-and-fro", (1, 2, 1), *words), folder / "runs/straight"
    assert series(runs[0], *LEARNED) == series(runs[1], *LEARNED)
    for node in ("stages", "optimizer"):
        states = [load_node_state(run / "checkpoints/step-6", node) for run in runs]
        ours, theirs = (hash_states(dict(sorted(state.items()))) for state in states)
        assert ours == theirs and len(ours) > 30


def test_circular_runs_continue_in_other_recipes_and_their_own_bit_exactly(folder: Path) -> None:
    """
    A resumed run has the bits of an uninterrupted run, and a checkpoint moves to another executor and back.

    Checkpoint and export use the tensor names of one rank.
    """
    run, files = folder / "runs/round", ["checkpoint.every=2", "checkpoint.keep=9", "run.name=round"]
    words = [*COMMON, *files, "mesh.pipeline=2", *schedule_words("circular")]

    def resume(step: int, ranks: int, words: Sequence[str]) -> None:
        if step:
            take_back(run, step)
        outcomes = drawloom(folder, *words, ranks=ranks)
        assert {outcome.code for outcome in outcomes} == {0}, outcomes

    resume(0, 2, words)
    assert_same(folder / "runs/one", run)
    learned, exported = series(run, *LEARNED), read_weights(run)
    resume(4, 2, words)
    assert series(run, *LEARNED) == learned and read_weights(run) == exported
    resume(2, 1, [*COMMON, *files])
    assert_same(folder / "runs/one", run)
    resume(4, 2, words)
    assert_same(folder / "runs/one", run)
    names = [
        load_node_state(folder / "runs" / name / "checkpoints/step-6", "stages").keys() for name in ("one", "round")
    ]
    assert names[0] == names[1]


def read_weights(run: Path) -> list[bytes]:
    """Return the bytes of the exported weights."""
    return [path.read_bytes() for path in sorted((run / "export").glob("*.safetensors"))]


def test_commands_read_a_checkpoint_of_two_ranks(folder: Path) -> None:
    """One process exports and samples from weights that two ranks saved."""
    words = [*COMMON, "run.name=parts", "mesh.pipeline=2", "trainer.steps=2", "trainer.on_finish=[]"]
    drawloom(folder, *words, ranks=2)
    exported = drawloom(folder, "export", "runs/parts", "--to", "whole")[0]
    assert exported.code == 0 and (folder / "whole/model.safetensors").exists(), exported
    assert drawloom(folder, "generate", "runs/parts", "--prompt", "def", "--tokens", "3")[0].text.startswith("def")


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


def test_a_model_with_experts_has_the_losses_of_one_process(folder: Path) -> None:
    """A mixture of experts with an auxiliary loss has one process's losses, export and sample on two ranks."""
    (folder / "sparse.toml").write_text(SPARSE, "utf-8")
    common = ["run", "sparse.toml", "batch.global_size=8", "trainer.steps=6"]
    assert drawloom(folder, *common, "run.name=one_sparse", "batch.micro_size=8")[0].code == 0
    words = ["batch.micro_size=1", "run.name=sparse", "mesh.pipeline=2"]
    outcomes = drawloom(folder, *common, *words, "schedule.use=pipeline.schedules.zero_bubble_1p", ranks=2)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    run, one = folder / "runs/sparse", folder / "runs/one_sparse"
    assert_same(one, run)
    assert (run / "sample.txt").read_bytes() == (one / "sample.txt").read_bytes()
    assert (run / "export/config.json").read_text() == (one / "export/config.json").read_text()
    assert drawloom(folder, "generate", str(run), "--prompt", "def", "--tokens", "3")[0].text.startswith("def")


def test_sharded_stages_offload_activations_with_the_same_bits(folder: Path) -> None:
    """FSDP's parameters are freed between passes; activations that wait in host memory change no loss or norm."""
    words = [*COMMON, "trainer.on_finish=[]", "mesh.data_shard=2", *schedule_words("gpipe")]
    for name, offload in (("resident", []), ("waiting", ["offload.use=pipeline.offloaded"])):
        outcomes = drawloom(folder, *words, f"run.name={name}", *offload, ranks=2)
        assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert series(folder / "runs/waiting", *LEARNED) == series(folder / "runs/resident", *LEARNED)
