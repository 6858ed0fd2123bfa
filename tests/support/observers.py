"""Effects of a component's settings, as values to compare: programs, weights, losses, rows, files, messages."""

import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import numpy as np
import torch
from torch import Tensor, nn

from drawloom.components.checkpoint import mirror as mirrors
from drawloom.components.data.bytes import Bytes
from drawloom.components.data.order.sequential import Sequential
from drawloom.components.data.pad_collator import PadCollator
from drawloom.components.data.text_files import TextFiles
from drawloom.components.data.token_arrays import TokenArrays
from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.single_process import HostMemory, SingleProcess
from drawloom.components.gradients import exact_norm
from drawloom.components.gradients.exact_norm import compute_exact_norm
from drawloom.components.kernels.auto import AutoKernels
from drawloom.components.kernels.choosing import OPERATIONS
from drawloom.components.pipeline.program.notation import format_program_csv
from drawloom.components.ports.corpus import TokenCorpus, complete_document
from drawloom.components.ports.data import Examples, MeasuredRows, MovableData, PackedDataset, RowSource, TokenBatch
from drawloom.components.ports.distributed import Device, Mesh, PerDimension, Precision
from drawloom.components.ports.model import Head, LayerRange, TokenContext
from drawloom.components.ports.pipeline import Loss, OuterLayersSchedule
from drawloom.components.ports.run import Batching, Event, Interval, RunFolder, RunInfo, Step
from drawloom.components.ports.stages import Role, Stage, Stages, default_role
from drawloom.graph import Every, UserError
from drawloom.graph.testing import build, fake
from support import chat
from support.checkpoints import SingleRankMesh, save_steps
from support.losses import sample
from support.metrics import MESH, combine, measure, step_of
from support.qwen3 import SIZES, SPARSE_SIZES, cpu_kernels, whole

Values = Mapping[str, Any]
JOB = {"name": "test", "seed": 7, "folder_path": Path("runs/test")}


def program(use: str, values: Values, _place: Path) -> Any:
    """
    Return a schedule's program for 4 ranks and 8 microbatches, its stages' policies, and layers in stages.
    """
    schedule = build(use, **values)
    actions, outer = schedule.program(4, 8), isinstance(schedule, OuterLayersSchedule)
    policies = actions.recompute, actions.offloaded
    return format_program_csv(actions), policies, schedule.get_pipelined_layer_count(4, 99) if outer else 99


def scaling_of(use: str, values: Values, _place: Path) -> Any:
    """Return a model's factors."""
    return build(use, **values).compute_scaling_for_size(64, 8)


def model_of(use: str, values: Values, _place: Path) -> Any:
    """Return shapes of parameters, logits, and gradients, where the router's gradients show its auxiliary loss."""
    model = build(use, kernels=cpu_kernels(), **values)
    module = model.build(LayerRange.of_whole_model(model.num_hidden_layers))
    for name, parameter in module.named_parameters():
        model.initialize_parameter(name, parameter.data, 1)
    logits = _compute_logits(module)
    logits.sin().sum().backward()
    sums = {name: (tuple(p.shape), _number(p.grad)) for name, p in module.named_parameters()}
    return sums, logits.tolist()


def logits_of(use: str, values: Values, _place: Path) -> Any:
    """Return a model's logits with seeded random weights: less than `model_of` observes, in half the time."""
    torch.manual_seed(1)
    module = whole(build(use, kernels=cpu_kernels(), **values))
    with torch.no_grad():
        return _compute_logits(module).tolist()


def _compute_logits(module: nn.Module) -> Any:
    """Return logits (2, 20, vocabulary) of fixed rows, one document apiece."""
    tokens = torch.arange(40).reshape(2, 20) % 29
    context = TokenContext(torch.arange(20).repeat(2, 1), torch.zeros_like(tokens), torch.ones(2, 20))

    def finish(hidden: Tensor, head: Head) -> Tensor:
        return head.logits(hidden)

    return module(tokens, context, finish)


def _number(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None else float(tensor.double().abs().sum())


def conversations_of(use: str, values: Values, folder: Path) -> Any:
    """Return ids and weights of the conversations of both splits."""
    conversations = build(use, tokenizer=chat.open_tokenizer(chat.tokenizer_folder(folder / "tokenizer")), **values)
    conversations.open()
    splits = [conversations.documents(split) for split in ("train", "validation")]
    return [(encoded.ids.tolist(), encoded.own_weights.tolist(), encoded.ends.tolist()) for encoded in splits]


def initial_weights_of(use: str, values: Values, _place: Path) -> Any:
    """Return the folder from which stages load their first weights."""
    return build(use, kernels=cpu_kernels(), **values).initial_weights


def config_of(use: str, values: Values, _place: Path) -> Any:
    """Return the `config.json` of an export."""
    return build(use, kernels=cpu_kernels(), **values).hugging_face_config()


def choose_kernels(use: str, values: Values, _place: Path) -> Any:
    """Return each operation's implementation, or why it can't run; on a CPU `auto` has reasons to choose eager ones."""
    kernels: AutoKernels = build(use, device=ComputeDevice(kind="cpu"), **values)
    try:
        return {operation: kernels.choose_implementation_of(operation) for operation in OPERATIONS}
    except UserError as error:
        return str(error)  # without Triton's interpreter


def rows_of_peers(use: str, values: Values, _place: Path) -> Any:
    """Return the row count on the first of two ranks. Its tokens are all its own, as the second never writes."""
    made = build(use, kernels=cpu_kernels(), mesh=fake(Mesh, expert_group=_Pair()), **values)
    return made.dispatch(torch.zeros(4, 8), torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, 2), 2).rows.shape


@attrs.frozen
class _Pair:
    """The first rank of a group of two, seen in one process."""

    rank: int = 0
    size: int = 2

    def max(self, tensor: Tensor) -> None:
        """Keep this rank's value, which is the maximum."""

    def allocate_symmetric_memory(self, size: int) -> HostMemory:
        """Return memory of both ranks."""
        return HostMemory([torch.zeros(size, dtype=torch.uint8) for _ in range(2)], SingleProcess())


def filter_of(use: str, values: Values, _place: Path) -> Any:
    """Return the options passed to a loss over the vocabulary."""
    calls: list[Any] = []

    def load(operation: str, implementation: str) -> Any:
        def record(*args: Any) -> Any:
            calls.append(args[3])
            return args[:2]

        return record

    with mock.patch("drawloom.components.kernels.auto.load_implementation", load):
        x = torch.zeros(2, 2)
        build(use, device=ComputeDevice(kind="cpu"), **values).linear_cross_entropy(x, x, x[0].long())
    return calls


@attrs.frozen
class _TwoParameters:
    """A matrix and a vector with gradients."""

    dtype: torch.dtype = torch.float32
    matrix: nn.Parameter = attrs.field(init=False)
    vector: nn.Parameter = attrs.field(init=False)

    @matrix.default
    def _matrix(self) -> nn.Parameter:
        return nn.Parameter(torch.ones(4, 4, dtype=self.dtype))

    @vector.default
    def _vector(self) -> nn.Parameter:
        return nn.Parameter(torch.ones(4, dtype=self.dtype))

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [("layers.0.weight", self.matrix), ("layers.0.norm", self.vector)]

    def parameter_slices(self) -> dict[str, Any]:
        return dict.fromkeys(name for name, _ in self.named_parameters())

    def roles(self) -> dict[str, Role]:
        return {name: default_role(name, part) for name, part in self.named_parameters()}

    def owned_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return self.named_parameters()

    def sum_remaining_gradients(self) -> None: ...

    def differentiate(self, factor: float) -> None:
        """Set gradients of different sizes."""
        for _, parameter in self.named_parameters():
            numbers = torch.arange(1, parameter.numel() + 1).reshape(parameter.shape)
            parameter.grad = (factor * numbers).to(self.dtype)


def weights_after_steps(use: str, values: Values, _place: Path) -> Any:
    """Return the weights after three steps of an optimizer, and its state."""
    parameters = _TwoParameters(torch.bfloat16 if "stochastic" in use else torch.float32)
    edges: dict[str, Any] = {"parameters": parameters, "mesh": SingleRankMesh()}
    if "stochastic" in use:
        edges |= {"job": fake(RunInfo, **JOB), "device": fake(Device, device=torch.device("cpu"), backend="gloo")}
    optimizer = build(use, **edges, **values)
    optimizer.open()
    for index in (1, 2, 3):
        parameters.differentiate(1e-4 * index * (-1) ** index)
        optimizer.run_phase(Step(index, 3, state={"lr_factor": 1.0}))
    return [parameter.tolist() for _, parameter in parameters.named_parameters()], str(optimizer.state_dict())


def memory_of_optimizer(use: str, values: Values, _place: Path) -> Any:
    """Return an optimizer's bytes on the device for bfloat16 weights."""
    edges: dict[str, Any] = {"parameters": _TwoParameters(torch.bfloat16), "mesh": SingleRankMesh()}
    if use == "optim.stochastic_adamw":
        device = fake(Device, device=torch.device("cpu"), backend="gloo")
        edges |= {"job": fake(RunInfo, **JOB), "device": device}
    return build(use, **edges, **values).device_bytes()


def average_weights(use: str, values: Values, _place: Path) -> Any:
    """Return the averages of changing weights."""
    parameters = _TwoParameters()
    average = build(use, parameters=parameters, **values)
    for index in (1, 2):
        average.run_phase(Step(index, 2))
        with torch.no_grad():
            parameters.matrix.add_(1.0)
    return {name: weight.tolist() for name, weight in average.averages().items()}


def detect_spikes(use: str, values: Values, _place: Path) -> Any:
    """Return the skipped steps, and whether the run goes back after them."""
    phase = build(use, data=fake(MovableData, next_row_position=40), **values)
    steps = [Step(index, 9, state={"loss": loss}) for index, loss in enumerate((2.0, 2.1, 1.9, 2.6, 2.0), 1)]
    for step in steps:
        phase.run_phase(step)
    return [(step.skip_reason, step.goes_back) for step in steps]


def end_after_lost_steps(use: str, values: Values, _place: Path) -> Any:
    """Return the step after which a run ends, and why."""
    phase = build(use, **values)
    try:
        for index, loss in enumerate((2.0, 5.0, 5.0, 9.0, 9.0, 9.0), 1):
            phase.run_phase(Step(index, 9, {"loss": torch.tensor(loss), "grad_norm": torch.tensor(1.0)}))
    except UserError as error:
        return str(error)
    return ""


def reasons_to_stop(use: str, values: Values, _place: Path) -> Any:
    """Return the steps after which a phase asks for the end of a run, and the reasons."""
    edges: Values = {"mesh": SingleRankMesh()} if use == "phases.budget" else {}
    phase = build(use, **edges, **values)
    phase.clock = iter(range(0, 9000, 40)).__next__  # a step takes 40 seconds
    reasons = []
    for index, loss in enumerate((2.0, 1.9, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0), 1):
        numbers = {"validation_loss": loss, "loss": -loss, "tokens": 60.0}
        step = Step(index, 99, {name: torch.tensor(value) for name, value in numbers.items()}, started=0.0)
        phase.run_phase(step)
        reasons.append(step.stop_reason)
    return reasons


def copies_of_mirror(use: str, values: Values, folder: Path) -> Any:
    """Return which stores have a checkpoint, after which steps a copy starts, and how long the end waits for it."""
    save_steps(folder / "run", 1)
    edges = {"folder": fake(RunFolder, folder=folder / "run"), "mesh": SingleRankMesh()}
    mirror = build(use, **edges, **{**values, "url": f"file://{folder}/{values['url']}"})
    mirror.clock = iter(range(0, 9000, 40)).__next__  # a step takes 40 seconds or more
    started: list[int] = []
    waits: list[float] = []

    def record_wait(futures: Any, timeout: float) -> None:
        waits.append(timeout)
        wait(futures)

    with mock.patch.object(mirrors, "wait", record_wait):
        mirror.open()
        for index in range(1, 8):
            before = mirror._last
            mirror.on_event(Event("step_ended", Step(index, 9)))
            started += [index] if mirror._last != before else []
            mirror._wait_for_upload_or_warn()
        mirror.close()
    return [name for name in ("one", "two") if (folder / name).exists()], started, set(waits)


def clip_gradients(use: str, values: Values, _place: Path) -> Any:
    """Return gradients after clipping."""
    parameters = _TwoParameters()
    parameters.differentiate(1.0)
    edges: dict[str, Any] = {"parameters": parameters}
    if "group" in use:
        reduce = build("distributed.sum_over_shards", mesh=SingleRankMesh())
        edges |= {"reduce": reduce, "device": fake(Device, device=torch.device("cpu"), backend="gloo")}
    build(use, **edges, **values).run_phase(Step(1, 1, state={"grad_norm": torch.tensor(40.0)}))
    return [parameter.grad.tolist() for _, parameter in parameters.named_parameters() if parameter.grad is not None]


def divide_gradients(use: str, values: Values, _place: Path) -> Any:
    """Whether the gradient norm is added up exactly."""
    parameters = _TwoParameters()
    parameters.differentiate(1.0)
    reduce = build("distributed.sum_over_shards", mesh=SingleRankMesh())
    step = step_of([1.0], [1.0], batches=[])
    with mock.patch.object(exact_norm, "compute_exact_norm", side_effect=compute_exact_norm) as exact:
        build(use, parameters=parameters, mesh=SingleRankMesh(), reduce=reduce, **values).run_phase(step)
    return exact.call_count


def loss_of(use: str, values: Values, _place: Path) -> Any:
    """Return the loss and its named sums."""
    inputs = sample()
    # Rows of one pair each whose chosen answer begins with a prompt of one token.
    pairs = (torch.arange(5) > 1).long().expand(3, 5)
    weights = inputs.batch.weights.clone()
    weights[:, 0] = 0
    batch = inputs.batch.evolve(reference=torch.zeros_like(weights), document_ids=pairs, weights=weights)
    total, weight, sums = build(use, **values).loss(inputs.hidden, inputs.head(), batch)
    return total.item(), weight.item(), {name: value.item() for name, value in sums.items()}


def measure_microbatches(use: str, values: Values, _place: Path) -> Any:
    """Return a metric's values over three microbatches, and its accumulators."""
    edges: Values = {} if use == "metrics.perplexity" else {"mesh": MESH}
    if use == "metrics.group":
        edges = {"members": [build("metrics.mean", mesh=MESH, of="loss")]}
    metric = build(use, **edges, **values)
    sums = {"cross_entropy": [2.0, 5.0, 9.0], "accuracy": [1.0, 1.0, 0.0]}
    return measure(metric, step_of([2.0, 6.0, 9.0], [1.0, 2.0, 5.0], sums)), str(metric.accumulators)


def distributions_of(use: str, values: Values, _place: Path) -> Any:
    """Return a metric's histograms for two steps."""
    parameters = _TwoParameters()
    metric = build(use, parameters=parameters, mesh=MESH, device=ComputeDevice(kind="cpu"), **values)
    metric.open()
    histograms = []
    for index in (1, 2):
        parameters.differentiate(1e-4)
        step = Step(index, 3)
        metric.run_phase(step)
        totals = combine(metric.accumulators, [metric.measure_on_rank(step)])
        histograms.append(metric.distributions(totals, step))
    return histograms


def count_sums(use: str, values: Values, _place: Path) -> Any:
    """Return a count metric's values over one microbatch, from two named sums of its shape."""
    metric = build(use, **values)
    [accumulator] = metric.accumulators.values()
    first = torch.arange(1.0, 1 + torch.Size(accumulator.shape).numel()).view(accumulator.shape)
    sums = {"confusion": first, "score_histogram": first, "labels": first, "other": first.flip(0).square()}
    return measure(metric, step_of([1.0], [1.0], {name: [part.tolist()] for name, part in sums.items()}))


def measure_bytes(use: str, values: Values, _place: Path) -> Any:
    """Return a metric's values over one microbatch of bytes."""
    metric = build(use, tokenizer=Bytes(), **values)
    metric.open()
    row = torch.tensor([[65, 66, 67]])
    batch = TokenBatch(row, row, row, row, torch.ones(1, 3))
    sums = {"cross_entropy": [2.0], "accuracy": [1.0]}
    return measure(metric, step_of([2.0], [3.0], sums, batches=[batch]))


def metric_names(use: str, values: Values, _place: Path) -> Any:
    """Return the names of a metric's values."""
    metric = build(use, device=ComputeDevice(kind="cpu"), users=Every(), **values)
    return sorted(measure(metric, Step(1, 1)))


def route_microbatch(use: str, values: Values, _place: Path) -> Any:
    """Return the routers' biases and a metric's values after a microbatch through a model with experts."""
    model = build("model.dots1", kernels=cpu_kernels(), **SPARSE_SIZES)
    module = model.build(LayerRange(0, 2, True, True))
    for name, parameter in module.named_parameters():
        model.initialize_parameter(name, parameter.data, 1)
    stages = fake(Stages, local=[Stage(0, 1, LayerRange(0, 2, True, True), module)])
    node = build(use, stages=stages, mesh=SingleRankMesh(), device=ComputeDevice(kind="cpu"), **values)
    node.open()
    tokens = torch.arange(40).reshape(2, 20) % 29
    shared = TokenContext(torch.arange(20).repeat(2, 1), torch.zeros_like(tokens), torch.ones(2, 20))
    module(tokens, shared, lambda hidden, head: head.logits(hidden))
    values_or_result = measure(node, Step(1, 1)) if use.startswith("metrics") else node.run_phase(Step(1, 1))
    return values_or_result, [buffer.tolist() for buffer in module.buffers()]


def utilization_of(use: str, values: Values, _place: Path) -> Any:
    """Return the names and sizes of a step's metrics; the step takes one second."""
    model = build("model.qwen3.dense", kernels=cpu_kernels(), **SIZES)
    edges: dict[str, Any] = {"mesh": SingleRankMesh(), "device": ComputeDevice(kind="cpu")}
    edges |= {
        "stages": fake(Stages, local=[]),
        "features": Every(),
        "loss": fake(Loss),
        "models": Every({"model": model}),
    }
    node = build(use, precision=fake(Precision), **edges, **values)
    node.open()
    ids = torch.zeros(1, 3, dtype=torch.int64)
    batch = TokenBatch(ids, ids, ids, ids, torch.ones(1, 3))
    return measure(node, Step(1, 9, {"tokens": float(3), "batches": [batch]}, interval=Interval(0.0, 1.0)))


def documents(use: str, values: Values, _place: Path) -> Any:
    """Return the first documents of each split; a corpus reads them from the current directory."""
    corpus = build(use, **values)
    return [list(islice(corpus.documents(split), 3)) for split in ("train", "validation")]


def tokens_of(use: str, values: Values, _place: Path) -> Any:
    """Return the ids of a document."""
    tokenizer = build(use, **values)
    tokenizer.open()
    return complete_document(tokenizer, tokenizer.encode("the quick fox")).tolist()


def first_tokens(use: str, values: Values, _place: Path) -> Any:
    """Return the tokens of the first document of each split; stores are in the current directory."""
    corpus = build(use, **values)
    corpus.check_before_open()
    splits = [corpus.documents(split) for split in ("train", "validation")]
    tokens_by_split = [split.read(0, 0, 99).ids.tolist() if len(split.lengths) else [] for split in splits]
    return tokens_by_split, corpus.vocab_size, corpus.eos_id


def find_caches(use: str, values: Values, folder: Path) -> Any:
    """Return the folders of the stores, below the current directory or `folder`."""
    (folder / "a.txt").write_text("text")
    corpus = TextFiles(paths=[str(folder / "a.txt")])
    job = fake(RunInfo, **JOB | {"folder_path": folder / "runs" / "test"})
    tokens = build(use, corpus=corpus, tokenizer=Bytes(), job=job, **values)
    tokens.open()
    tokens.close()
    return sorted(path.parent.parent.name for root in (Path(), folder) for path in root.rglob("*-train/store.json"))


def pack_documents(use: str, values: Values, _place: Path) -> Any:
    """Return the tokens of all rows."""
    documents = TokenArrays.concatenate([np.arange(9), np.arange(5), np.arange(3), np.arange(4)], np.uint16)
    corpus = fake(TokenCorpus, documents=lambda split: documents, vocab_size=10, eos_id=0)
    packing = build(use, tokens=corpus, job=fake(RunInfo, **JOB), **values)
    packing.open()
    return packing.batch("train", range(packing.count_rows("train"))).tokens.tolist()


def make_proving_rows(use: str, values: Values, _place: Path) -> Any:
    """Return the tokens of two rows."""
    return build(use, tokenizer=Bytes(), **values).batch("train", [0, 1]).tokens.tolist()


def examples_of(use: str, values: Values, _place: Path) -> Any:
    """Return the token ids of the training examples."""
    data = build(use, **values)
    data.open()
    return [example["input_ids"] for example in data.examples("train")]


def pad_examples(use: str, values: Values, _place: Path) -> Any:
    """Return the tokens of two examples."""
    if use == "data.pad_collator":
        return build(use, **values).collate([{"input_ids": [1, 2]}, {"input_ids": [3, 4, 5, 6, 7]}], 6).tokens.tolist()
    data = fake(Examples, examples=[{"input_ids": [1, 2]}, {"input_ids": [3, 4, 5, 6, 7]}])
    rows = build(use, data=data, collator=PadCollator(), **values)
    rows.open()
    return rows.batch("train", [0, 1]).tokens.tolist()


def _numbers(_split: str, indices: Any) -> TokenBatch:
    rows = torch.tensor(list(indices))[:, None]
    return TokenBatch(rows, rows, rows, rows, rows.float(), rows)


def _rows() -> Any:
    return fake(PackedDataset, count_rows=lambda split: 50, batch=_numbers, length=1)


def _batching() -> Any:
    positions = {"microbatch_row_positions": lambda step: [[2 * step, 2 * step + 1]]}
    first = {"first_row_position": lambda step: 2 * step - 2}
    return fake(Batching, global_size=2, micro_size=2, dp_size=1, dp_rank=0, **positions, **first)


def load_microbatches(use: str, values: Values, _place: Path) -> Any:
    """Return the first microbatches, and the batches requested from workers, if there are any."""
    asked: list[Any] = []

    class Workers:
        """Workers without processes."""

        def __init__(self, *args: Any) -> None:
            asked.append(args[1:])

        def batches(self, wanted: Iterator[Any], ahead: int, timeout: float) -> Iterator[TokenBatch]:
            asked.append((ahead, timeout))
            return (_numbers("train", indices) for indices in wanted)

        def close(self) -> None: ...

    with mock.patch("drawloom.components.data.workers.Workers", Workers):
        edges = {"rows": _rows(), "batching": _batching(), "order": Sequential(), "mesh": SingleRankMesh()}
        loader = build(use, **edges, **values)
        loader.open()
        positions = [batch.positions.tolist() for _ in range(3) for batch in loader.next_step()]
    return positions, asked


def weights_of_sources(use: str, values: Values, _place: Path) -> Any:
    """Return the weights of two sources; the second has twice the tokens."""
    sources = {
        name: fake(TokenCorpus, documents=TokenArrays.concatenate([np.arange(size)], np.uint16), vocab_size=10)
        for name, size in (("one", 5), ("other", 10))
    }
    mixture = build(use, sources=sources, **values)
    return [source.weight for source in mixture.documents("train").sources]


def rows_in_order(use: str, values: Values, _place: Path) -> Any:
    """Return the rows of an epoch, which grow longer."""
    edges: dict[str, Any] = {}
    if use == "data.order.sorted_buffers":
        edges = {"job": fake(RunInfo, **JOB), "lengths": fake(MeasuredRows, tokens_per_row=np.arange(12))}
    return build(use, **edges, **values).rows_at(RowSource("", 0, 12, 66, 1.0), 0, np.arange(12)).tolist()


def validation_rows(use: str, values: Values, _place: Path) -> Any:
    """Return the rows of an evaluation."""
    validation = build(use, rows=_rows(), batching=_batching(), **values)
    return [batch.tokens.tolist() for batch in validation.batches()]


def rows_of_steps(use: str, values: Values, _place: Path) -> Any:
    """Return the positions of two steps on the first of two ranks."""
    mesh = fake(Mesh, sizes=PerDimension(data_shard=2), indices=PerDimension.of_first_rank())
    batching = build(use, mesh=mesh, rows=fake(PackedDataset, length=8), **values)
    return [batching.microbatch_row_positions(step) for step in (1, 2)]


def lr_factors(use: str, values: Values, _place: Path) -> Any:
    """Return the factors of ten steps."""
    sizes = {"batching": build("run.batch", mesh=SingleRankMesh(), global_size=4, micro_size=4)}
    sizes["rows"] = fake(PackedDataset, length=8)
    phase, steps = build(use, **sizes, **values), [Step(index, 10) for index in range(1, 11)]
    for step in steps:
        phase.run_phase(step)
    return [step.state["lr_factor"] for step in steps]


@contextmanager
def messages(name: str) -> Iterator[list[str]]:
    """Yield the logged messages."""
    logged: list[str] = []

    class Collects(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record.getMessage())

    logger, handler = logging.getLogger(name), Collects()
    with ExitStack() as stack:
        stack.callback(logger.setLevel, logger.level)
        stack.callback(logger.removeHandler, handler)
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        yield logged
