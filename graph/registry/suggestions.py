"""Hints for names without a component, and problems with imports."""

import importlib.util
import sys

from drawloom.graph.component import NAME
from drawloom.graph.foreign_names import fold_name
from drawloom.graph.problems import Problem, did_you_mean
from drawloom.graph.spelling import find_nearest

MAX_OFFERED = 6
"""Names in a hint about a word with which several names begin."""


def describe_siblings(use: str, names: list[str]) -> str:
    """Return a hint with the components in the same folder; empty without one."""
    beside = f"{use.rpartition('.')[0]}."
    near = [name for name in names if name.startswith(beside)]
    return f"the components beside it are {', '.join(near)}" if near else ""


def suggest_name(use: str, names: list[str]) -> str:
    """Return a hint: the most similar name in the folder, or else anywhere, or the components of the folder."""
    inside = [name for name in names if name.startswith(f"{use}.")]
    if inside:
        return f"it contains {', '.join(inside)}"
    beside = [name for name in names if name.partition(".")[0] == use.partition(".")[0]]
    if not beside:
        package, _, rest = use.partition(".")
        offer = f"to use the components of the package {package!r}, add --import {package}"
        offer = offer if _belongs_to_installed_package(use) else ""
        if not rest and (own := did_you_mean(use, names)):
            return own
        # optim.adamw is similar to torch.optim.AdamW
        path = rest.lower()
        if near := find_nearest(path, [name for name in names if name.startswith(f"{path.partition('.')[0]}.")]):
            return f"did you mean {near!r}?{offer and f' Otherwise, {offer}'}"
        if offer:
            return offer
    folder, _, last = use.rpartition(".")
    siblings = [name for name in names if name.rpartition(".")[0] == folder]
    if folder and siblings:
        # Compare last words only: with the folder most letters agree, and optim.lion would be near to optim.muon.
        ends = {name.rpartition(".")[2]: name for name in [*beside, *siblings]}
        near = ends.get(find_nearest(last, ends) or next((end for end in ends if end.startswith(last)), ""))
        siblings_hint = (
            f"`drawloom list {folder}` lists the components" if len(siblings) > 12 else describe_siblings(use, names)
        )
        return f"did you mean {near!r}?" if near else siblings_hint
    near = find_nearest(use, beside) or find_nearest(use, names)
    general_hint = "`drawloom list` lists all components; add your own with --import and a package, folder or file"
    longer = [repr(near)] if near else [repr(name) for name in names if _has_part_beginning_with(use, name)]
    return f"did you mean {' or '.join(longer)}?" if 0 < len(longer) <= MAX_OFFERED else general_hint


def _has_part_beginning_with(word: str, use: str) -> bool:
    """Return whether a part of a component's name begins with a word, as `pipeline.schedules.zero_bubble_v` does."""
    beginning = fold_name(word)
    return len(beginning) > 2 and any(fold_name(part).startswith(beginning) for part in use.split("."))


def _belongs_to_installed_package(use: str) -> bool:
    """Return whether a name may be in an installed package outside the standard library; nothing is imported."""
    package = use.partition(".")[0]
    if not NAME.fullmatch(use) or package in sys.stdlib_module_names:
        return False
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:
        return False
    return spec is not None and bool(spec.submodule_search_locations)


def make_import_problem(use: str, module: str, error: Exception) -> Problem:
    """Return the problem with a component whose module can't be imported: a missing package, or any other error."""
    missing = error.name if isinstance(error, ModuleNotFoundError) and error.name else ""
    own = module.partition(".")[0]
    if missing and missing.partition(".")[0] != own:
        text = f"{use!r} needs the package {missing!r}, which is not installed"
        return Problem("DL202", text, f"pip install {missing.partition('.')[0]}")
    text = f"{use!r} can't be imported: {type(error).__name__}: {error}"
    return Problem("DL205", text, f"`python -c 'import {module}'` prints the traceback")
