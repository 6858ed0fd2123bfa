"""
Imports of most runs, made once in the fork server: they take seconds.

Python 3.11 does not pass its search path on to this process, so it is passed by a variable, which is removed here.
Forked processes have the same path, so the entry points that are cached here are theirs, too.
"""

import atexit
import gc
import os
import sys
from contextlib import suppress
from importlib import import_module
from itertools import product

from drawloom.components.kernels.choosing import OPERATIONS, load_implementation
from drawloom.graph.project import Project
from drawloom.graph.types.port_match import implements_any
from support.protocol_members import find_members_once

LATE = (
    "components.checkpoint.reader",
    "components.checkpoint.remote",
    "components.checkpoint.restore",
    "components.checkpoint.saves",
    "components.checkpoint.staging.copy_plan",
    "components.data.auto_tokenizer",
    "components.data.batch_checks",
    "components.data.bytes_files",
    "components.data.order.permutation",
    "components.data.order.stream",
    "components.data.packing.batches",
    "components.data.packing.best_fit",
    "components.data.packing.row_checks",
    "components.data.sources.files",
    "components.data.sources.formats",
    "components.data.store.build",
    "components.data.text_files",
    "components.distributed.guard",
    "components.distributed.launched_ranks",
    "components.distributed.mesh_sizes",
    "components.distributed.torch_release",
    "components.export.adapter",
    "components.export.hf_writer",
    "components.frozen_weights.quantized",
    "components.gradients.exact_norm",
    "components.listeners.log_handlers",
    "components.listeners.run_header",
    "components.listeners.time_limits",
    "components.listeners.watchdog",
    "components.model.decoder.layer",
    "components.model.decoder.initial_weights",
    "components.model.decoder.layer",
    "components.model.decoder.mapper",
    "components.optim.named_state",
    "components.optim.torch_groups",
    "components.overlap.shard_copies",
    "components.overlap.shifts",
    "components.parallel.buckets",
    "components.parallel.data_parallel",
    "components.parallel.ddp",
    "components.parallel.fsdp",
    "components.phases.step_reports",
    "components.pipeline.program.lowering",
    "components.pipeline.program.timing",
    "components.pipeline.runtime.p2p",
    "components.pipeline.runtime.program_runner",
    "components.pipeline.runtime.rank_plans",
    "components.pipeline.schedules.gpipe",
    "components.pipeline.schedules.zero_bubble_v",
    "components.pipeline.split_backward.split_backward",
    "components.run.folder_records",
    "components.run.generators",
    "components.run.locks",
    "components.run.signal_handlers",
    "components.run.skipped_steps",
    "components.sampling.generate",
    "components.stages.activation_specs",
    "components.stages.assembly",
    "components.stages.feature_stack",
    "components.stages.initial_values",
    "components.state.sharding",
    "graph.cli.commands.training.run",
    "graph.inspect.changes",
    "graph.inspect.resolved",
    "graph.inspect.serialize",
    "graph.runtime.opened",
    "kernels.rope.frequencies",
)
"""Modules that most runs import late."""

if "PYTHONPATH" in os.environ:
    sys.path[:] = os.environ.pop("PYTHONPATH").split(os.pathsep)
find_members_once()
import_module("torch._dynamo")  # takes a second of its own
with suppress(ImportError):
    import_module("transformers.modeling_utils")  # a second, too, in every rank that trains or exports such a model
import_module("torch.distributed.tensor.debug")  # every rank of a sharded mesh imports it
import_module("numpy.ma")  # torch imports it in the first step
for name in ("blocks", "pipelines", "processes", "runs", "survival"):  # whose functions most processes run
    import_module(f"support.{name}")
with suppress(Exception):  # the test of a broken component reports it
    workshop = Project.from_package("drawloom")
    graph = workshop.graph(workshop.load("first_run", [], []))
    graph.require_valid()
    classes = [node.spec.cls for node in graph.nodes.values()]
    for cls, field in product(
        classes, (field for node in graph.nodes.values() for field in node.spec.fields_of_kind_every)
    ):
        implements_any(cls, field.ports)  # is cached, as for the container of every run
for operation in OPERATIONS:
    load_implementation(operation, "eager")  # as every run does on a CPU
for name in ("_strptime", "rich.console", "torch.profiler._cupti_monitor"):  # which most runs import later
    import_module(name)
for name in LATE:
    import_module(f"drawloom.{name}")
gc.freeze()  # no collection of a forked process walks through, and copies, what all of them share
gc.set_threshold(10_000)  # of 700, every 25th second of a rank would pass in collections
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # a thread that wakes preempts none that holds its lock
atexit.register(gc.unfreeze)  # or extension modules report what is left when the interpreter ends
