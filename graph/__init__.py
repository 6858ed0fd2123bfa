"""Recipes, graphs and containers: wiring described in TOML, checked as a whole, built once. It knows no domain."""

from drawloom.graph.bounds import above, at_least, between
from drawloom.graph.component import component
from drawloom.graph.port import Every, Ordered, port
from drawloom.graph.problems import Place, Problem, RecipeError, UserError
from drawloom.graph.recipe.lockfile import ResolvedRecipe
from drawloom.graph.setting import Names, setting

__all__ = [
    "Every",
    "Names",
    "Ordered",
    "Place",
    "Problem",
    "RecipeError",
    "ResolvedRecipe",
    "UserError",
    "above",
    "at_least",
    "between",
    "component",
    "port",
    "setting",
]
