"""
Imports of most runs, made once in the fork server: they take seconds.

Python 3.11 does not pass its search path on to this process, so it is passed by a variable, which is removed here.
Forked processes have the same path, so the entry points that are cached here are theirs, too.
"""

import atexit
import gc
import os
import pkgutil
import sys
from contextlib import suppress
from importlib import import_module
from itertools import product

import drawloom
from drawloom.components.kernels.choosing import OPERATIONS, load_implementation
from drawloom.graph.project import Project
from drawloom.graph.types.port_match import implements_any
from support.protocol_members import find_members_once

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
LATER = {"__main__", "pytest_plugin", "triton"}  # runpy and pytest warn of modules that are imported already
for module in pkgutil.walk_packages(drawloom.__path__, "drawloom."):
    if not LATER & {*module.name.split(".")}:
        with suppress(Exception):  # tests of a module that cannot be imported say why, or skip without its package
            import_module(module.name)
gc.freeze()  # no collection of a forked process walks through, and copies, what all of them share
gc.set_threshold(10_000)  # of 700, every 25th second of a rank would pass in collections
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # a thread that wakes preempts none that holds its lock
atexit.register(gc.unfreeze)  # or extension modules report what is left when the interpreter ends
