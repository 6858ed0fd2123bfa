"""Models with checkpoint weights from run folders, for read-only commands, and inference over documents."""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import tomli
import torch
from torch import Tensor

from drawloom import Container
from drawloom.components.checkpoint.commit import FOLDER, list_checkpoints, step_of_checkpoint
from drawloom.components.checkpoint.mirror import fetch_run
from drawloom.components.checkpoint.reader import (
    find_newest_valid_checkpoint,
    load_node_state,
    read_manifest_if_sizes_match,
)
from drawloom.components.commands._recipes import find_only_node
from drawloom.components.export.hf_writer import read_exported_step
from drawloom.components.storage.durable_files import open_untrusted_file
from drawloom.graph.cli.command import (
    Command,
    Project,
    Recipe,
    Result,
    UserError,
    argument,
    command,
    option,
    output,
    output_class,
)
from drawloom.graph.recipe.layers import Layer
from drawloom.graph.recipe.lockfile import LOCK
from drawloom.ports import FILES, AveragedWeights, FrozenModel, Stages, TokenContext, TokenCorpus


def parse_run_or_mirror(text: str) -> Path | str:
    """Return the path of a run folder, or the URL of a mirror."""
    return text if "://" in text else Path(text)


class TrainedRun(NamedTuple):
    """Open nodes with a checkpoint's weights, its step, and the run folder, which is a copy of a mirror's."""

    nodes: Container
    step: int
    folder: Path


@command
class CheckpointCommand(Command):
    """A command with the weights of a run's checkpoint."""

    run_folder: Path | str = argument(
        "such as runs/first_run, or the URL of its mirror, such as s3://bucket/first_run",
        parse=parse_run_or_mirror,
    )
    average: bool = option("use the averaged weights of phases.ema")
    step: int | None = option("use the checkpoint after this step (default: newest)", exclusive="checkpoint")
    best: bool = option("use the checkpoint with the lowest validation loss", exclusive="checkpoint")
    computes_loss: ClassVar[bool] = False  # a teacher or reference model is needed for a loss alone

    @contextmanager
    def open_run(
        self,
        project: Project,
        *ports: type,
        every: Sequence[type] = (),
        change: Callable[[Recipe], Recipe] | None = None,
    ) -> Iterator[TrainedRun]:
        """
        Open a run with a checkpoint's weights in this process.

        Open the nodes that implement `ports`, and their dependencies, after applying `change` to the recipe; for the
        ports in `every`, open all nodes but corpora. The run folder is only read, and the run may continue meanwhile.
        """
        with _fetch_remote_run(self) as folder:
            while (checkpoint := _choose_checkpoint_if_any(self, folder)) is not None:
                try:
                    recipe = _load_recipe_for_one_process(project, checkpoint / LOCK, folder / FILES)
                    recipe = change(recipe) if change else recipe
                    names = [find_only_node(recipe.graph, port, str(checkpoint)) for port in (Stages, *ports)]
                    weights = load_node_state(checkpoint, names[0])
                    if self.average:
                        weights |= _load_averaged_weights(recipe, checkpoint)
                    break
                except (UserError, OSError):
                    if os.path.lexists(checkpoint):
                        raise
                    # The run has removed the checkpoint since, so that there is a newer one.
            else:
                raise missing_checkpoint_error(folder)
            data = recipe.graph.implementers(TokenCorpus)  # a command need not have the run's data
            others = [name for port in every for name in recipe.graph.implementers(port) if name not in data]
            unused = () if self.computes_loss else recipe.graph.implementers(FrozenModel)
            with recipe.open([*names, *others], dict.fromkeys(unused)) as nodes:
                nodes[names[0]].load_state_dict(weights)
                del weights
                yield TrainedRun(nodes, step_of_checkpoint(checkpoint), folder)

    @contextmanager
    def open_run_or_model_folder(self, project: Project, *ports: type) -> Iterator[tuple[Container, int | None]]:
        """
        Open a run like `open_run`, or a model folder with a `config.json`, such as an export, and yield nodes and step.

        A model folder's step is None unless the folder is an export. Raises UserError for options to choose a
        checkpoint of a model folder.
        """
        folder = self.run_folder
        if not isinstance(folder, Path) or not (folder / "config.json").is_file():
            with self.open_run(project, *ports) as run:
                yield run.nodes, run.step
            return
        if self.average or self.best or self.step is not None:
            raise UserError(
                f"{folder} is a model folder without checkpoints; leave --step, --best and --average out", 2
            )
        recipe = Recipe.load("finetune", project=project).with_values({"vars": {"base": str(folder)}}, "RUN_FOLDER")
        names = [find_only_node(recipe.graph, port, str(folder)) for port in ports]
        with recipe.open(names) as nodes:
            yield nodes, read_exported_step(folder)


@output_class
class CheckpointResult(Result):
    """A result from a run's checkpoint."""

    run_folder: Path | str = output("run folder, or the URL of its mirror")
    step: int = output("step of the checkpoint")

    @property
    def origin(self) -> str:
        """The run and the step, for the text."""
        return f"{self.run_folder}, step {self.step}"


@contextmanager
def _fetch_remote_run(choice: CheckpointCommand) -> Iterator[Path]:
    """Yield the run folder. Of a mirror it is temporary, and has the chosen checkpoint."""
    url = choice.run_folder
    if isinstance(url, Path):
        yield url
        return
    with tempfile.TemporaryDirectory(prefix="drawloom-mirror-") as folder:
        run = Path(folder) / (url.rstrip("/").rpartition("/")[2] or "run")
        fetch_run(url, run, choice.step)
        yield run


def missing_checkpoint_error(folder: Path) -> UserError:
    """Return the error for a folder without a finished checkpoint; it suggests a likely run folder."""
    fault = "holds no finished checkpoint" if folder.is_dir() else "is not a folder"
    # Users write the name of a run instead of its folder, which is in `runs` by default.
    near = Path("runs") / folder
    hint = f"did you mean {str(near)!r}?" if near.is_dir() else "give the folder of a run, such as runs/first_run"
    if folder.parent.name == FOLDER and folder in list_checkpoints(folder.parent):
        fault, hint = "is a checkpoint", f"give the folder of its run, {folder.parent.parent}"
    return UserError(f"{folder} {fault}; {hint}", 2)


def _load_averaged_weights(recipe: Recipe, checkpoint: Path) -> dict[str, Any]:
    """Return averaged weights (phases.ema) by parameter name. Raises UserError if the checkpoint has none."""
    if not recipe.graph.implementers(AveragedWeights):
        raise UserError(f"{checkpoint} has no average of its weights; leave --average out, or train with phases.ema", 2)
    state = load_node_state(checkpoint, find_only_node(recipe.graph, AveragedWeights, str(checkpoint)))
    if not any(state.values()):
        raise UserError(f"--average: {checkpoint} has no averages yet; leave --average out, or train longer", 2)
    return {name: parts["average"] for name, parts in state.items()}


def _choose_checkpoint_if_any(choice: CheckpointCommand, folder: Path) -> Path | None:
    """Return the requested checkpoint, or None if the run has none. Raises UserError if no checkpoint matches."""
    checkpoints = list_checkpoints(folder / FOLDER)
    if choice.step is not None and checkpoints:
        matching = [path for path in checkpoints if step_of_checkpoint(path) == choice.step]
        if not matching:
            steps = (
                f"step{'s' * (len(checkpoints) > 1)} {', '.join(str(step_of_checkpoint(path)) for path in checkpoints)}"
            )
            raise UserError(f"--step {choice.step}: {folder} has checkpoints of {steps}; write one of these", 2)
        return matching[0]
    if choice.best and checkpoints:
        manifests = ((path, read_manifest_if_sizes_match(path)) for path in checkpoints)
        values = [(manifest.values.get("validation_loss"), path) for path, manifest in manifests if manifest]
        known = [(loss, path) for loss, path in values if loss is not None]
        if not known:
            hint = "let checkpoint.every be a multiple of evaluate.every"
            raise UserError(f"--best: no checkpoint in {folder} has a validation loss; {hint}", 2)
        return min(known)[1]
    return find_newest_valid_checkpoint(folder)


IN_CHECKPOINTS = {
    "loss.reward": "head",
    "loss.classification": "head",
    "loss.multi_token": "layers",
    "stages.grafted": "folder",
}
"""Settings that name folders with initial weights, by component; a checkpoint has later weights."""


def _load_recipe_for_one_process(project: Project, lock: Path, files: Path) -> Recipe:
    """Return a run's recipe for a single process, with paths to the file copies in the run folder."""
    data = read_recipe_tables(lock)
    nodes = [*_iterate_node_tables(data)]
    has_adapters = any(node.get("adapters") for node in nodes)  # their checkpoints lack frozen parts
    _remove_initial_weight_settings(data, nodes)
    for node in nodes:
        use = node["use"]
        if use in IN_CHECKPOINTS and not (use == "stages.grafted" and has_adapters):
            node.pop(IN_CHECKPOINTS[use], None)
        if use == "distributed.mesh":  # a single process holds the whole model
            processes = node["processes"]
            node.clear()
            node.update(use=use, processes=processes)
        if str(use).startswith(("pipeline.schedules.", "pipeline.from_csv")):  # others may need more than one rank
            node.clear()
            node["use"] = "pipeline.schedules.one_f_one_b"
        if use == "pipeline.circular.executor":  # it runs a schedule of its own alone
            node["use"] = "pipeline.executor"
    for copies in files.glob("*/*"):
        _point_path_to_copy(data, copies)
    return Recipe.of(data, str(lock), project=project)


def read_recipe_tables(lock: Path) -> dict[str, Any]:
    """Return the tables in a run's recipe. Raises UserError if it is not TOML."""
    with open_untrusted_file(lock) as file:
        text = file.read(0, file.size)
    try:
        return tomli.loads(text.decode("utf-8"))
    except ValueError as error:
        raise UserError(f"{lock} can't be read: {error}; give another run folder", 2) from error


FOLDER_MODELS = ("model.auto", "model.transformers")
"""Components that load the weights of the folder `path`, unless `weights` is false."""


def _find_model_table(data: dict[str, Any], stages: dict[str, Any]) -> Any:
    """Return the table of the stages' model: an inline one, or the one that they name; {} if there is none."""
    model = stages.get("model")
    return model if isinstance(model, dict) else data.get(str(model).removeprefix("@"), {})


def _iterate_node_tables(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the tables of nodes in a lock file: at the top, members of groups, and inline ones."""
    if isinstance(value, dict) and "use" in value:
        yield value
    if isinstance(value, dict | list):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _iterate_node_tables(child)


def _find_initial_folder(data: dict[str, Any], stages: dict[str, Any]) -> str | None:
    """Return the folder of the stages' initial weights; None if they were random."""
    model = _find_model_table(data, stages)
    own = model.get("path") if model.get("use") in FOLDER_MODELS and model.get("weights", True) else None
    return stages.get("weights") or own


def _remove_initial_weight_settings(data: dict[str, Any], nodes: Sequence[dict[str, Any]]) -> None:
    """Remove initial weights, except frozen ones, because checkpoints lack them."""
    stages = [node for node in nodes if node["use"] in ("stages.materialized", "stages.frozen")]
    folders = [_find_initial_folder(data, node) for node in stages]  # before a change: stages may share a model
    for node, folder in zip(stages, folders, strict=True):
        node.pop("weights", None)  # not needed, and may be gone
        if folder and (node.get("adapters") or node["use"] == "stages.frozen"):
            node["weights"] = folder  # the run folder has copies of the other files only
        model = _find_model_table(data, node)
        if model.get("use") in FOLDER_MODELS:
            model["weights"] = False


def find_base_folder_of_run(run_folder: Path) -> Path | None:
    """Return the initial weights' folder in a run's recipe; None if they were random."""
    lock = run_folder / LOCK
    data = read_recipe_tables(lock)
    for node in _iterate_node_tables(data):
        if node["use"] == "stages.materialized":
            folder = _find_initial_folder(data, node)
            return None if folder is None else Path(Layer(str(lock), data).folder, folder)
    return None


def find_chat_template(nodes: Container) -> Path | None:
    """Return the recipe's file with a chat template; None for the tokenizer's."""
    return next(filter(None, (node.settings.get("template") for node in nodes.graph.nodes.values())), None)


T = TypeVar("T")


def get_if_any(run: Container, port: Callable[..., T]) -> T | None:
    """Return the only open object for a port; None if there is none, as for a model without tokens."""
    with suppress(LookupError):
        return run.get(port)
    return None


def _point_path_to_copy(data: dict[str, Any], copies: Path) -> None:
    """Replace a node's file path by the path to its copy, and a folder path by the folder with copies."""
    node: Any = data
    for part in copies.parent.name.split("."):  # a member of a group is a table in the group's table
        node = node.get(part) if isinstance(node, dict) else None
    if isinstance(node, dict) and isinstance(named := node.get(copies.name), str):
        copies = copies.absolute()  # relative paths of the lock file have another folder
        copy = copies / Path(named).name
        node[copies.name] = str(copy if copy.is_file() else copies)


R = TypeVar("R")


def infer_documents(
    documents: Iterable[T], size: int, infer: Callable[[Sequence[T]], Iterable[R] | None]
) -> Iterator[tuple[T, R]]:
    """
    Yield every document with its result; `infer` returns the results for at most `size` documents.

    Raises UserError if `infer` returns None, as on ranks without the last stage.
    """
    remaining = iter(documents)
    while batch := [*islice(remaining, size)]:
        if (results := infer(batch)) is None:
            raise UserError("the last pipeline stage is on another rank; start one process, with mesh.pipeline=1", 2)
        yield from zip(batch, results, strict=True)


def pad_documents(documents: Sequence[Tensor | Sequence[int]]) -> tuple[Tensor, TokenContext]:
    """Return documents as rows, int64 (documents, length), with their context; padding is a separate document."""
    lengths = torch.tensor([len(ids) for ids in documents])
    tokens = torch.zeros(len(documents), max(1, int(lengths.max())), dtype=torch.int64)
    for row, ids in zip(tokens, documents, strict=True):
        row[: len(ids)] = torch.as_tensor(ids, dtype=torch.int64)
    positions = torch.arange(tokens.shape[1]).repeat(len(documents), 1)
    return tokens, TokenContext(positions, (positions >= lengths[:, None]).long())
