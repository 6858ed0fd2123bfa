"""Effects of settings on a run's components, as values to compare; beside `observers`."""

import gc
import gzip
import logging
import os
import secrets
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import torch
from torch import Tensor
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from drawloom.components.checkpoint import commit
from drawloom.components.checkpoint.staging import copy_plan, overlapped
from drawloom.components.data.bytes import Bytes
from drawloom.components.distributed import launched_ranks, membership, torchrun
from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.device_model import find_device_model
from drawloom.components.distributed.generation import Generation, RunProcess
from drawloom.components.distributed.guard import guard
from drawloom.components.distributed.membership import CURRENT
from drawloom.components.distributed.precision import DtypePolicy
from drawloom.components.distributed.single_process import SingleProcess
from drawloom.components.distributed.torchrun import Launch
from drawloom.components.float8.layers import Float8Linear
from drawloom.components.overlap.tensor_products import OverlappedAttention, OverlappedProducts
from drawloom.components.parallel.tensor_ranks import TensorRanks, split_over_ranks
from drawloom.components.planning import check
from drawloom.components.planning.plan import plan
from drawloom.components.ports.data import TokenBatch, ValidationData
from drawloom.components.ports.distributed import Device, Group, Mesh, Pending, Processes
from drawloom.components.ports.model import Model, TokenContext, list_quantized_parameter_formats
from drawloom.components.ports.pipeline import Executor
from drawloom.components.ports.run import (
    EpochCounter,
    Event,
    Events,
    Phase,
    Randomness,
    RunFolder,
    RunInfo,
    Step,
    Stop,
)
from drawloom.components.ports.stages import Parameters, Stages
from drawloom.components.state.step_state import StepState
from drawloom.components.trackers import aim, background
from drawloom.graph import Every, UserError
from drawloom.graph.project import Recipe
from drawloom.graph.testing import build, fake
from support.checkpoints import SingleRankMesh, StateNode, checkpointer
from support.doubles import SilentRank
from support.observers import JOB, Values, messages
from support.plans import on_a_gpu, plan_check
from support.qwen3 import dense, whole
from support.steps import losses_of, pass_on_gradients, train

TINY: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 32,
}


@contextmanager
def open_node(node: Any) -> Iterator[Any]:
    """Yield an open component."""
    node.open()
    try:
        yield node
    finally:
        node.close()


def _recipe(folder: Path, **values: Any) -> Recipe:
    run = {"name": "small", "folder": str(folder / "run")}
    return Recipe.load("first_run").with_values({"model": TINY, "run": run, **values})


def stages_of(use: str, values: Values, folder: Path) -> Any:
    """Return the layers of both stages of a rank, and the dtypes and values of stored and computed parameters."""
    node = "stages" if use == "stages.materialized" else "precision"
    schedule = {"use": "pipeline.schedules.zero_bubble_v"}
    with _recipe(folder, **{node: dict(values)}, schedule=schedule).open(only="stages") as objects:
        parameters: list[Any] = []
        for stage in objects["stages"].local:
            used = dict(stage.module.named_parameters())
            for name, kept in stage.named_masters_or_parameters():
                dtypes = kept.dtype, kept.grad_dtype, used[name].dtype, used[name].grad_dtype
                parameters.append((stage.span, name, dtypes, float(kept.detach().double().sum())))
        parameters.append(objects["stages"].device_bytes()["compute_copies"])
        return parameters


def float8_layers_of(use: str, values: Values, folder: Path) -> Any:
    """Return names and kernels of linear layers in float8, and the bytes in their copies."""
    tables = {"precision": {"compute": "bfloat16"}, "float8": {"use": use, **values}}
    with _recipe(folder, **tables).open(only="stages") as objects:
        modules = [named for stage in objects["stages"].local for named in stage.module.named_modules()]
        names = [(name, type(layer.float8)) for name, layer in modules if isinstance(layer, Float8Linear)]
        return names, objects["stages"].device_bytes()["compute_copies"]


def shifts_of_two_ranks(use: str, values: Values, folder: Path) -> Any:
    """Return the class by which the feature's attention exchanges tokens."""
    with torch.device("meta"):
        module = whole(dense())
    split_over_ranks(module, TensorRanks(SilentRank(0, 2)))
    OverlappedProducts(**values).convert(module, DtypePolicy(), {})
    return {type(part.shifts).__name__ for part in module.modules() if isinstance(part, OverlappedAttention)}


def frozen_weights_of(use: str, values: Values, folder: Path) -> Any:
    """Return a frozen model's weights, all of them added up."""
    teacher = {"use": use, "model": {"use": "model.auto", "path": str(Path("exported").absolute())}, **values}
    tables = {"teacher": teacher, "loss": {"use": "loss.distill"}}
    with _recipe(folder, **tables).open(only="teacher") as objects:
        (stage,) = objects["teacher"]._stages.local
        return sum(float(parameter.double().sum()) for parameter in stage.module.parameters())


def grafted_weights_of(use: str, values: Values, folder: Path) -> Any:
    """Return all weights, added up, with some from a folder in the current directory."""
    graft = {"use": use, **values, "folder": str(Path(values["folder"]).absolute())}
    with _recipe(folder, graft=graft).open(only="stages") as objects:
        (stage,) = objects["stages"].local
        return sum(float(parameter.detach().double().sum()) for parameter in stage.module.parameters())


def count_recomputations(use: str, values: Values, folder: Path) -> Any:
    """Count how often each layer's first norm runs in a step of one microbatch."""
    runs = Counter[int]()
    with _recipe(folder, stages=dict(values)).open(only="executor") as objects:
        executor = objects["executor"]
        (stage,) = executor.stages.local
        for number, block in enumerate(executor.stages.model.blocks(stage.module)):
            block.input_layernorm.register_forward_hook(lambda *_, number=number: runs.update([number]))
        tokens = torch.arange(6).unsqueeze(0)
        train(executor, [TokenBatch(tokens, tokens, tokens, torch.zeros_like(tokens), torch.ones(tokens.shape))])
    return runs


@attrs.define
class _Recorder(SingleProcess):
    """A group of three ranks, which records the tensors to sum."""

    size = 3
    summed: list[Any] = attrs.field(factory=list)

    def start_sum(self, tensor: Tensor) -> Pending:
        self.summed.append((tensor.dtype, tensor.numel()))
        return super().start_sum(tensor)


def planned_gather(use: str, values: Values, folder: Path) -> float:
    """Return the seconds for gathering weights that a plan for two H100s expects."""
    sharded = {"mesh": {"data_shard": 2}, "stages": {"reshard_after_forward": False}, "batch": {"micro_size": 8}}
    float8 = {"precision": {"compute": "bfloat16"}, "float8": {"use": use, **values}}
    recipe = _recipe(folder, **float8, **sharded)
    return plan(recipe, find_device_model("h100"), 2).time.gather


def sums_over_replicas(use: str, values: Values, folder: Path) -> Any:
    """Return the dtypes and sizes of the tensors summed by three replicas."""
    node = "stages" if use == "stages.materialized" else "precision"
    group = _Recorder()
    mesh = SingleRankMesh(replica_group=group)
    with _recipe(folder, **{node: dict(values)}).open(only="stages", replacements={"mesh": mesh}) as objects:
        objects["stages"].local[0].shards.reduce_in_next_backward(is_last_in_step=True)
        pass_on_gradients(objects["stages"])
    return group.summed


LORA = {"use": "adapters.lora", "targets": ["q_proj"], "rank": 2, "alpha": 4.0}


def formats_of_frozen_weights(use: str, values: Values, folder: Path) -> Any:
    """Return the quantized formats by name in a model with an adapter, whose rows have 64 elements or more."""
    model = TINY | {"num_hidden_layers": 1, "hidden_size": 64, "head_dim": 64, "intermediate_size": 64}
    quantized = {"precision": {"compute": "bfloat16"}, "quantized": {"use": use, **values}}
    tables = {"model": model, "lora": LORA, "stages": {"adapters": ["@lora"]}, **quantized}
    with _recipe(folder, **tables).open(only="stages") as objects:
        formats = list_quantized_parameter_formats(objects["stages"].local[0].module)
        return {name: weight_format.name for name, weight_format in formats.items()}


def train_with_adapter(use: str, values: Values, folder: Path) -> Any:
    """Return an adapter's trained parameters, and logits in a pass with gradients, where no parameter is zero."""
    adapter = {"use": use, **values}
    with _recipe(folder, adapter=adapter, stages={"adapters": ["@adapter"]}).open(only="stages") as objects:
        (stage,) = objects["stages"].local
        named = objects["stages"].named_parameters()
        torch.manual_seed(0)
        for _, parameter in named:
            torch.nn.init.normal_(parameter)
        tokens = torch.arange(6).unsqueeze(0)
        shared = TokenContext(torch.arange(6).unsqueeze(0), torch.zeros_like(tokens))
        logits = stage.module(tokens, shared, lambda hidden, head: head.logits(hidden))
        return [(name, tuple(parameter.shape)) for name, parameter in named], logits.detach().tolist()


def problems_of_loss(use: str, values: Values, folder: Path) -> Any:
    """Return the problems of a loss in a recipe without adapters."""
    return [str(problem) for problem in _recipe(folder, loss={"use": use, **values}).graph.problems]


def export_adapter(use: str, values: Values, folder: Path) -> Any:
    """Return the configuration of an exported adapter."""
    tables = {"lora": LORA, "stages": {"adapters": ["@lora"]}, "adapter": {"use": use, **values}}
    with _recipe(folder, **tables, trainer={"on_finish": ["@adapter"]}).open(only="adapter") as objects:
        objects["adapter"].run_after_training(1)
    return (folder / "run" / "adapter" / "adapter_config.json").read_text("utf-8")


def export_files(use: str, values: Values, folder: Path) -> Any:
    """Return an export's files with their sizes."""
    with _recipe(folder, export=dict(values)).open(only="export") as objects:
        objects["export"].run_after_training(1)
    return sorted((path.name, path.stat().st_size) for path in (folder / "run" / "export").iterdir())


def sizes_of_mesh(use: str, values: Values, _place: Path) -> Any:
    """Return the mesh sizes over 4 ranks."""
    world = {"rank": 0, "world_size": 4, "make_group": lambda name, rank_sets: SingleProcess()}
    mesh = build(use, processes=fake(Processes, **world), **values)
    mesh.open()
    return mesh.sizes.settings()


def device_of(use: str, values: Values, _place: Path) -> Any:
    """Return the device, the backend, and torch's thread count while it is open."""
    before = torch.get_num_threads()
    device = build(use, **values)
    if device.device.type != "cpu" or device.backend != "gloo":
        return device.device, device.backend  # to open these takes a GPU
    with open_node(device):
        return device.device, device.backend, torch.get_num_threads() - before


def join_timeouts(use: str, values: Values, _place: Path) -> Any:
    """Return the timeout with which a process joins the process group."""

    timeouts: list[float] = []

    def join(backend: str, timeout: Any, device_id: Any) -> None:
        timeouts.append(timeout.total_seconds())
        raise RuntimeError("no other process")

    launch = Launch(rank=0, world_size=2)
    node = build(use, device=fake(Device, device=torch.device("cpu"), backend="gloo"), **values)
    with (
        mock.patch.object(torchrun, "read_launch", lambda: launch),
        mock.patch.dict(membership.RUNS, clear=True),
        mock.patch("torch.distributed.init_process_group", join),
        suppress(UserError),
    ):
        node.open()
    return timeouts


def join_running(use: str, values: Values, _place: Path) -> tuple[int, float]:
    """Return the generation and heartbeat timeout of a process that finds a run begun, and is its only member."""
    store, run, own = HashStore(), secrets.token_hex(8), RunProcess.of_this_process()
    store.set(CURRENT, Generation(run, 0, []).to_json())
    PrefixStore(run, store).set("admitted/1", Generation(run, 1, [own]).to_json())
    node = build(use, device=fake(Device, device=torch.device("cpu"), backend="gloo"), **values)
    with (
        mock.patch.object(torchrun, "read_launch", lambda: Launch(address="localhost", agent_store=True)),
        mock.patch.dict(membership.RUNS),
        mock.patch.object(launched_ranks, "read_launch", lambda: Launch(address="localhost", agent_store=True)),
        mock.patch.object(launched_ranks, "connect_to_launch_store", lambda *_: store),
        mock.patch.object(membership, "connect_to_launch_store", lambda *_: store),
        mock.patch.object(launched_ranks, "start_exit_with_parent_thread"),
        mock.patch.dict("os.environ"),
        open_node(node),
    ):
        return node.generation, node._ranks.monitor.heartbeat_timeout


def randomness_of(use: str, values: Values, _place: Path) -> Any:
    """Return the run folder, numbers of a stream, and whether torch is deterministic while it is open."""
    of_job = use == "run.job"
    job = build(use, **values) if of_job else fake(RunInfo, **JOB)
    node = build("run.randomness", job=job, mesh=SingleRankMesh(), **({} if of_job else values))
    with open_node(node):
        numbers = torch.rand(3, generator=node.stream("a")).tolist()
        return job.name, job.folder_path, numbers, torch.are_deterministic_algorithms_enabled()


def stops(use: str, values: Values, _place: Path) -> Any:
    """Return the handled signals, and whether the process ends within 0.3 seconds of one."""
    codes: list[int] = []
    node = build(use, mesh=SingleRankMesh(), **values)
    node.exit = codes.append
    before = {name: signal.getsignal(getattr(signal, name)) for name in ("SIGINT", "SIGTERM", "SIGUSR1")}
    with messages("drawloom.run"), mock.patch("os.write"), open_node(node):
        handled = [name for name, handler in before.items() if signal.getsignal(getattr(signal, name)) != handler]
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)
    return handled, codes


def run_trainer(use: str, values: Values, _place: Path) -> Any:
    """Run a phase that skips every step. Return its steps, and the error that ends the run, or "" without one."""
    steps: list[int] = []

    def skip(step: Step) -> None:
        step.skip("a test")
        steps.append(step.index)

    edges = {"phases": [fake(Phase, run_phase=skip)], "events": fake(Events), "stop": fake(Stop)}
    counter = fake(EpochCounter, count_epochs_after=lambda step: Fraction(step, 2))
    trainer = build(use, randomness=fake(Randomness), epoch_counter=counter, **edges, **values)
    try:
        trainer.run()
    except UserError as error:
        return steps, str(error)
    return steps, ""


def steps_of_phase(use: str, values: Values, _place: Path) -> Any:
    """Return the steps at which a phase acts: an evaluation, a collection, a line in the log."""

    def evaluate(state: StepState) -> None:
        state["losses"] = losses_of(1.0, 1.0)

    device = fake(Device, device=torch.device("cpu"))
    executor = fake(Executor, evaluate=evaluate)
    edges: dict[str, Any] = {
        "phases.evaluate": {"data": fake(ValidationData), "executor": executor, "device": device},
        "phases.report": {"device": device},
    }.get(use, {})
    if use != "phases.garbage_collection":
        edges["mesh"] = SingleRankMesh()
    phase, events = build(use, **edges, **values), []
    with messages("drawloom.run") as logged, mock.patch.object(gc, "collect", lambda *_: logged.append("collected")):
        if use == "phases.evaluate":
            phase.after_restore(0)
        for index in range(1, 7):
            step = Step(index, 6, state={"loss": 1.0})
            phase.run_phase(step)
            if use == "phases.garbage_collection":
                phase.on_event(Event("saving_started", step))
            events.append((len(logged), "validation_loss" in step.state, "initial_validation_loss" in step.state))
    return events


def compared_steps(use: str, values: Values, _place: Path) -> Any:
    """Return the steps at which two replicas exchange digests."""
    steps: list[int] = []

    def gather(value: Any) -> list[Any]:
        steps.append(step.index)
        return [value, value]

    mesh = fake(Mesh, replica_group=fake(Group, size=2, gather_json=gather))
    phase = build(use, mesh=mesh, parameters=fake(Parameters, named_parameters=lambda: []), **values)
    for step in (Step(index, 6) for index in range(1, 7)):
        phase.run_phase(step)
    return steps


def steps_of_replays(use: str, values: Values, _place: Path) -> Any:
    """Return the steps whose first microbatch is repeated."""
    steps: list[int] = []

    def rerun_passes_for_comparison(state: StepState) -> None:
        steps.append(step.index)
        state["losses"] = losses_of(1.0, 1.0)

    node = build(
        use,
        mesh=SingleRankMesh(),
        model=fake(Model),
        stages=fake(Stages, local=[]),
        parameters=fake(Parameters, named_parameters=lambda: []),
        executor=fake(Executor, rerun_passes_for_comparison=rerun_passes_for_comparison),
        device=ComputeDevice(kind="cpu"),
        **values,
    )
    with open_node(node):
        for step in (Step(index, 6) for index in range(1, 7)):
            node.on_event(Event("step_started", step))
            whole = torch.ones(1, 2, dtype=torch.int64)
            step.state["batches"] = [TokenBatch(whole, whole, whole, whole, torch.ones(1, 2))]
            step.state["losses"] = losses_of(1.0, 1.0)
            node.on_event(Event("phase_ended", step, "forward_backward"))
    return steps


def checkpoints_of(use: str, values: Values, folder: Path) -> Any:
    """Return the checkpoints after each of 6 steps, whose losses go up and down."""
    node, names_by_step = checkpointer(folder, {"memory": StateNode({"step": 1})}, **values), []
    for index, loss in enumerate((3.0, 9.0, 1.0, 7.0, 5.0, 4.0), 1):
        node.run_phase(Step(index, 7, state={"loss": loss}))
        names_by_step.append(sorted(path.name for path in (folder / "checkpoints").iterdir()))
    node.close()
    return names_by_step


def count_failed_saves(use: str, values: Values, folder: Path) -> Any:
    """Count the failed saves before the run stops."""
    node, count = checkpointer(folder, {"memory": StateNode({"step": 1})}, every=1, **values), 0

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with (
        mock.patch.object(commit, "create_clean_folder", fail, create=False),
        messages("drawloom.checkpoint"),
    ):
        try:
            for index in range(1, 9):
                node.run_phase(Step(index, 9))
                count = index
        except UserError:
            pass
    node.close()
    return count


def stage_values(use: str, values: Values, _place: Path) -> Any:
    """Return how many buffers are kept for the next copy."""
    module: Any = copy_plan if use == "checkpoint.staging.blocking" else overlapped
    stager, kept = build(use, **values), []
    pool = module.Pool

    def recorded(**options: Any) -> Any:
        kept.append(options)
        return pool(**options)

    with mock.patch.object(module, "Pool", recorded):
        stager.stage({"a": torch.zeros(2)})
        stager.synchronize_staging()
        stager.close()
    return kept


def write_sample(use: str, values: Values, folder: Path) -> Any:
    """Return the sampled text, from logits that depend on all visible tokens."""

    def infer(tokens: Tensor, shared: Any) -> Tensor:
        generator = torch.Generator().manual_seed(int((tokens * torch.arange(1, tokens.shape[1] + 1)).sum()))
        return 4 * torch.randn(*tokens.shape, 257, generator=generator)

    edges = {
        "model": fake(Executor, infer=infer),
        "tokenizer": Bytes(),
        "folder": fake(RunFolder, folder=folder),
        "randomness": fake(Randomness, stream=lambda *_: torch.Generator().manual_seed(1)),
        "mesh": SingleRankMesh(),
    }
    with messages("drawloom.run"):
        build(use, **edges, **values).run_after_training(1)
    return (folder / "sample.txt").read_text("utf-8")


def levels_of_logging(use: str, values: Values, folder: Path) -> Any:
    """Return the levels of the installed handlers."""
    before = list(logging.getLogger("drawloom").handlers)
    with open_node(build(use, folder=fake(RunFolder, folder=folder), mesh=SingleRankMesh(), **values)):
        return [handler.level for handler in logging.getLogger("drawloom").handlers if handler not in before]


def events_of_run(use: str, values: Values, folder: Path) -> Any:
    """Return the calls of timeouts in a run of two steps, and the guard's limit while a node opens."""
    timed = fake(Processes)
    node = build(use, folder=fake(RunFolder, folder=folder), mesh=SingleRankMesh(), processes=timed, **values)
    node.on_event(Event("run_started"))
    for index in (1, 2):
        step = Step(index, 2)
        for kind in ("step_started", "saving_started", "saving_ended", "step_ended"):
            node.on_event(Event(kind, step))
    node.on_event(Event("run_ended"))
    with mock.patch.object(guard, "set_time_limit") as allow, node.lifecycle_context("open", "corpus"):
        return [call.arguments for call in timed.calls], allow.call_args.args[0]


def plan_refuses(use: str, values: Values, folder: Path) -> Any:
    """Whether a run is refused if it does not fit its GPU."""
    without_remedies = mock.patch.object(check, "describe_excess", return_value="")  # to find them takes seconds
    with on_a_gpu(2_000_000), without_remedies:
        try:
            plan_check(folder, "cuda", **values).open()
        except UserError:
            return True
    return False


def memory_choices(use: str, values: Values, folder: Path) -> Any:
    """Return a plan's choice, or None if the run does not fit."""
    return _memory_choices_on("cpu", use, values, folder)


def memory_choices_of_wide_layers(use: str, values: Values, folder: Path) -> Any:
    """Return a GPU plan's choice for layers that take longer than a launch, or None if the run does not fit."""
    model = {**TINY, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 4}
    return _memory_choices_on("h100", use, values, folder, model=model, vars={"length": 2048})


def _memory_choices_on(device: str, use: str, values: Values, folder: Path, **tables: Any) -> Any:
    optimizer = {"use": "optim.stochastic_adamw", "lr": 1e-3, "memory": "@memory", "slot_bytes": 4096}
    tables |= {"memory": {"use": use, **values}, "stages": {"memory": "@memory"}, "optimizer": optimizer}
    planned = plan(_recipe(folder, **tables), find_device_model(device))
    return planned.choice if planned.fits else None


def traces_of_run(use: str, values: Values, folder: Path) -> Any:
    """Return the traces of a run of six steps, and whether they show memory."""
    edges: Values = {"device": ComputeDevice(kind="cpu"), "stages": Every()}
    node = build(use, folder=fake(RunFolder, folder=folder), mesh=SingleRankMesh(), **edges, **values)
    for index in range(1, 7):
        for kind in ("step_started", "step_ended"):
            node.on_event(Event(kind, Step(index, 6)))
            torch.ones(1)
    node.close()
    return {path.name: "memory of the CPU" in gzip.open(path, "rt").read() for path in sorted(folder.rglob("*.gz"))}


def tracker_calls(use: str, values: Values, folder: Path) -> Any:
    """Return the queue's size, the timeout for its end, and the package's arguments."""
    name = use.rpartition(".")[2]
    edges = {
        "csv": {"folder": fake(RunFolder, folder=folder)},
        "tensorboard": {"folder": fake(RunFolder, folder=folder)},
        "wandb": {"folder": fake(RunFolder, folder=folder), "job": fake(RunInfo, **JOB)},
        "mlflow": {"folder": fake(RunFolder, folder=folder), "job": fake(RunInfo, **JOB)},
        "trackio": {"job": fake(RunInfo, **JOB)},
    }
    loaded = mock.patch(f"drawloom.components.trackers.{name}.import_tracker_package", create=True)
    with mock.patch.object(background, "Background") as background_class, loaded as load:
        with open_node(build(use, mesh=SingleRankMesh(), **edges[name], **values)) as tracker:
            tracker.rewind(0)
            background_class.return_value.try_to_queue.call_args.args[0]()
        if name == "mlflow":
            client = load.return_value.MlflowClient
            asked = (
                client.return_value.get_experiment_by_name.call_args.args,
                client.call_args.args[0].partition("/")[0],
            )
            return (
                background_class.call_args.args[1],
                background_class.return_value.finish_tasks.call_args.args[0],
                asked,
            )
        asked = load.return_value.init.call_args
        arguments = {key: value for key, value in asked.kwargs.items() if key not in OWN} if asked else {}
        return (
            background_class.call_args.args[1],
            background_class.return_value.finish_tasks.call_args.args[0],
            arguments,
        )


OWN = ("id", "dir", "settings")
"""Arguments that differ from run to run."""


def aim_calls(use: str, values: Values, folder: Path) -> Any:
    """Return the queue's size, the timeout for Aim, and the arguments for its repository and run."""
    with mock.patch.object(aim, "import_aim") as load, mock.patch.object(background, "Background") as background_class:
        (folder / ".aim").mkdir(parents=True)
        edges = {"folder": fake(RunFolder, folder=folder), "mesh": SingleRankMesh(), "job": fake(RunInfo, **JOB)}
        with open_node(build(use, **edges, **values)) as tracker:
            wait = background_class.return_value.run_and_wait
            wait.call_args.args[0]()
            tracker.rewind(0)
            with mock.patch.multiple(aim, read_stored_run_id=mock.DEFAULT, store_run_id=mock.DEFAULT):
                wait.call_args.args[0]()
            address, options = (
                load.return_value.Repo.from_path.call_args.args[0],
                load.return_value.Run.call_args.kwargs,
            )
            del options["repo"]  # the mock
            return background_class.call_args.args[1], wait.call_args.args[1], "://" in address, options
