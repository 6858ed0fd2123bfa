"""
What most runs need, imported once in the process from which all others are forked: it takes seconds.

Python 3.11 does not hand its search path on to that process, so it comes by a variable, which ends here.
"""

import os

from drawloom.graph.workshop import Workshop

os.environ.pop("PYTHONPATH", None)
workshop = Workshop.of("drawloom")
workshop.graph(workshop.load("first_run", [], [])).or_error()
