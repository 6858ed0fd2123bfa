"""Every shipped component, and how pages link to it."""

from functools import cache

from drawloom.graph.project import Project
from drawloom.graph.registry.registry import Spec


@cache
def project() -> Project:
    """The project whose components and recipes are documented."""
    return Project.from_package("drawloom")


@cache
def specs() -> list[Spec]:
    """The shipped components by name, without those of plugins. Raises RuntimeError if one can't be read."""
    found = [project().registry.find(name) for name in project().registry.own.names()]
    if broken := [str(each) for each in found if not isinstance(each, Spec)]:
        raise RuntimeError("\n".join(broken))
    return [each for each in found if isinstance(each, Spec)]


def subject(use: str) -> str:
    """The page of a component: its folder."""
    return use.partition(".")[0]


def anchor(heading: str) -> str:
    """The anchor of a heading that is an identifier, with dots perhaps."""
    return heading.lower().replace(".", "")


def component_link(spec: Spec, up: str) -> str:
    """A link to a component, from a page `up` from the top."""
    return f"[`{spec.use}`]({up}reference/components/{subject(spec.use)}.md#{anchor(spec.use)})"
