"""
The ports (interfaces between components) and the plain data that components exchange.

Public are the names defined by these modules, and not their imports, as type checkers see it.
"""

from drawloom.components.ports.checkpoint import *
from drawloom.components.ports.corpus import *
from drawloom.components.ports.data import *
from drawloom.components.ports.distributed import *
from drawloom.components.ports.experts import *
from drawloom.components.ports.features import *
from drawloom.components.ports.kernels import *
from drawloom.components.ports.model import *
from drawloom.components.ports.pipeline import *
from drawloom.components.ports.program import *
from drawloom.components.ports.run import *
from drawloom.components.ports.slices import *
from drawloom.components.ports.stages import *
from drawloom.components.ports.tracking import *
from drawloom.components.ports.weights import *
from drawloom.components.state.batch import *
from drawloom.components.state.step_state import *
from drawloom.kernels.attention.options import *
from drawloom.kernels.results import *

TYPE_CHECKING = False
if TYPE_CHECKING:
    from drawloom.components.ports.rollouts import *
    from drawloom.components.ports.shared_texts import *
else:

    def __getattr__(name):
        # Reinforcement learning has ports that other runs do not import.
        from importlib import import_module

        for home in ("shared_texts", "rollouts") if not name.startswith("_") else ():
            names = vars(import_module(f"drawloom.components.ports.{home}"))
            if name in names:
                return names[name]
        raise AttributeError(f"module 'drawloom.ports' has no attribute {name!r}")
