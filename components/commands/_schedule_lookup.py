"""Look-up of pipeline schedules by name: open one, list them, and suggest one for a misspelt name."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from drawloom.components.commands._costs import choose_cost_settings_of_schedule
from drawloom.components.commands._schedule_simulation import Size, UnsuitableError
from drawloom.components.planning.cost_sources import CostSource
from drawloom.components.ports.pipeline import Schedule
from drawloom.graph import Problem, RecipeError, UserError
from drawloom.graph.problems import find_nearest
from drawloom.graph.project import Project, Recipe
from drawloom.graph.recipe.loading import RecipeFolder
from drawloom.graph.recipe.lockfile import LOCK
from drawloom.graph.registry.spec import Spec

FOLDER = "pipeline.schedules."


def names_a_recipe(name: str, project: Project) -> bool:
    """Return whether a name means a recipe: a TOML file, a run folder, or a shipped recipe."""
    is_run = (Path(name) / LOCK).is_file()
    return is_run or name.endswith(".toml") or RecipeFolder(project.recipes).find(name) is not None


def suggest_schedule(name: str, project: Project) -> str | None:
    """Return a schedule with a similar name, or None if the name is, or resembles, a recipe's."""
    folder = RecipeFolder(project.recipes)
    if Path(name).exists() or names_a_recipe(name, project) or find_nearest(name, folder.names):
        return None
    schedules = [use.removeprefix(FOLDER) for use in project.registry.names() if use.startswith(FOLDER)]
    return find_nearest(name, schedules)


def list_schedules_without_required_settings(project: Project) -> Iterator[str]:
    """Yield the names of schedules without required settings."""
    for name in project.registry.names():
        spec = project.registry.find(name) if name.startswith(FOLDER) else None
        if isinstance(spec, Spec) and not any(field.required for field in spec.fields.values()):
            yield name.removeprefix(FOLDER)


def find_schedule_name_and_spec(project: Project, name: str) -> tuple[str, Spec]:
    """Return a schedule's full name and component. Raises RecipeError for an unknown name."""
    use = name if "." in name else FOLDER + name
    spec = project.registry.find(use)
    if isinstance(spec, Problem):
        raise RecipeError([spec])
    return use, spec


def open_schedule_by_name(
    project: Project, name: str, source: CostSource, size: Size, stages_per_rank: int | None, nodes: Mapping[str, Any]
) -> Schedule:
    """
    Open a schedule by name, with costs, stages per rank and microbatches if it has such settings.

    `nodes` are values over it, and other nodes.
    """
    use, spec = find_schedule_name_and_spec(project, name)
    try:
        data: dict[str, Any] = {"use": use, **choose_cost_settings_of_schedule(spec.fields, source, size.ranks)}
    except UserError as error:
        raise UnsuitableError(str(error), error.exit_code) from error
    if "stages_per_rank" in spec.fields and stages_per_rank:
        data["stages_per_rank"] = stages_per_rank
    if "microbatches" in spec.fields:
        data["microbatches"] = size.microbatches
    data |= nodes.get("schedule", {})
    recipe = Recipe.of({**nodes, "schedule": data}, "command line", project=project)
    with recipe.open("schedule") as opened:
        if "schedule" not in recipe.graph.implementers(Schedule):
            raise UserError(f"{use} is not a schedule; `drawloom list pipeline.schedules` shows all", 2)
        schedule: Schedule = opened["schedule"]
    return schedule


def check_stages_per_rank(stages_per_rank: int | None, name: str, schedule: Schedule, ranks: int) -> None:
    """Raise UserError if the schedule's stages per rank differ from --stages-per-rank."""
    if stages_per_rank is None:
        return
    if stages_per_rank != (stages := len(schedule.stage_to_rank(ranks)) // ranks):
        has = f"{name} has {stages} stages per rank"
        raise UserError(f"--stages-per-rank {stages_per_rank}: {has}; leave it out", 2)
