"""
What most runs need, imported once in the process from which all others are forked: it takes seconds.

Python 3.11 does not hand its search path on to that process, so it comes by a variable, which ends here.
"""

import os
from contextlib import suppress
from importlib import import_module

from drawloom.graph.cli.project import Project

os.environ.pop("PYTHONPATH", None)
import_module("torch._dynamo")  # by itself one of those seconds
with suppress(Exception):  # whatever is wrong with a component is for a test to tell
    project = Project.of("drawloom")
    project.graph(project.load("first_run", [], [])).or_error()
