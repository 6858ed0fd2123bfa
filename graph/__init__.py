"""Recipes, graphs and containers: components wired by TOML, checked as a whole, built once."""

from drawloom.graph.component import (
    Every,
    Ordered,
    above,
    at_least,
    between,
    component,
    component_base_class,
    internal,
    port,
    setting,
    wired,
)
from drawloom.graph.problems import Position, Problem, RecipeError, UserError
from drawloom.graph.recipe.lockfile import ResolvedRecipe

__all__ = [
    "Every",
    "Ordered",
    "Position",
    "Problem",
    "RecipeError",
    "ResolvedRecipe",
    "UserError",
    "above",
    "at_least",
    "between",
    "component",
    "component_base_class",
    "internal",
    "port",
    "setting",
    "wired",
]
