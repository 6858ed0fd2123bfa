"""
Train language models from components combined in a recipe.

    import drawloom
    from drawloom.components.run.trainer import Trainer

    recipe = drawloom.Recipe.load("first_run", "optimizer.lr=1e-3")
    with recipe.open() as run:
        run.get(Trainer).run()

`run` returns 0 after the last step, or the stopping signal's number, such as SIGINT from Ctrl-C. It raises a
`RecipeError` before anything is built, a `UserError` with a remedy, or any other error if a component has a bug. With
several ranks, every rank raises the `UserError` printed by one rank.

`Recipe` is for users who run recipes. Authors of components use `component`, `setting`, its bounds `above`, `at_least`
and `between`, `internal`, `port`, `wired`, `Every` and `Ordered`, `NodeView` in `constraints`, `reward` and `tool` for
functions, interfaces between components in `drawloom.ports`, building blocks in `drawloom.models`, and
`drawloom.testing`. Names outside `__all__` of these four modules are internal. Components in the tree import the same
names.
"""

TYPE_CHECKING = False  # stands for typing.TYPE_CHECKING: importing `typing` takes as long as starting Python
if TYPE_CHECKING:
    from drawloom import models as models
    from drawloom import ports as ports
    from drawloom import testing as testing
    from drawloom.components.environments.function_tool import tool
    from drawloom.components.rewards.function import reward
    from drawloom.graph import above, at_least, between
    from drawloom.graph.component import Every, Ordered, component, internal, port, setting, wired
    from drawloom.graph.problems import Position, Problem, RecipeError, UserError
    from drawloom.graph.project import Recipe
    from drawloom.graph.recipe.lockfile import ResolvedRecipe
    from drawloom.graph.runtime.container import Container
    from drawloom.graph.wiring.node import NodeView

__version__ = "0.1.0"

__all__ = [
    "Container",
    "Every",
    "NodeView",
    "Ordered",
    "Position",
    "Problem",
    "Recipe",
    "RecipeError",
    "ResolvedRecipe",
    "UserError",
    "__version__",
    "above",
    "at_least",
    "between",
    "component",
    "internal",
    "models",
    "port",
    "ports",
    "reward",
    "setting",
    "testing",
    "tool",
    "wired",
]

if not TYPE_CHECKING:  # otherwise type checkers would accept any attribute

    def __getattr__(name):
        # Imported at the first use: the command line must install its signal handlers before other imports.
        if name not in __all__:
            raise AttributeError(f"module 'drawloom' has no attribute {name!r}")
        from importlib import import_module

        homes = {
            "Recipe": "graph.project",
            "Container": "graph.runtime.container",
            "NodeView": "graph.wiring.node",
            "reward": "components.rewards.function",
            "tool": "components.environments.function_tool",
        }
        if name in ("models", "ports", "testing"):
            return import_module(f"drawloom.{name}")
        globals()[name] = value = getattr(import_module(f"drawloom.{homes.get(name, 'graph')}"), name)
        return value

    def __dir__():
        return sorted(__all__)
