"""Adds the generated pages to the site while mkdocs builds it; none of them is a file in the repository."""

from functools import cache
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from generate.components import component_pages, settings_page
from generate.flat import flat_source_page
from generate.front import root_page
from generate.ports import port_pages
from generate.reference import python_page, recipes_page, with_help
from generate.results import results_page
from generate.step import step_page


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Called by mkdocs first: the navigation gets the generated pages of folders."""
    config.nav = _filled(config.nav)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by mkdocs when it has found the pages that are files."""
    for name, text in pages().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Called by mkdocs for each page: commands get their help, and the search ranks generated pages last."""
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation"]
    elif page.file.src_uri in pages():
        page.meta["search"] = {"boost": 0.5}
    return with_help(markdown) if page.file.src_uri == "commands.md" else markdown


@cache
def pages() -> dict[str, str]:
    """The text of all generated pages, by their names in the site."""
    return {
        "index.md": root_page("README.md"),
        "contributing.md": root_page("CONTRIBUTING.md"),
        "changelog.md": root_page("CHANGELOG.md"),
        "step.md": step_page(),
        "reference/first_run_source.md": flat_source_page(),
        "reference/recipes.md": recipes_page(),
        "reference/python.md": python_page(),
        "reference/results.md": results_page(),
        "reference/settings.md": settings_page(),
        **dict(component_pages()),
        **dict(port_pages()),
    }


def _filled(nav: Any) -> Any:
    """A part of the navigation; the name of a folder becomes the list of its pages, of which the index comes first."""
    match nav:
        case list():
            return [_filled(item) for item in nav]
        case dict():
            return {title: _filled(item) for title, item in nav.items()}
        case str() if nav.endswith("/"):
            return sorted((name for name in pages() if name.startswith(nav)), key=lambda name: "/index" not in name)
    return nav
