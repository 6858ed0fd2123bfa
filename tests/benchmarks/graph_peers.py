"""
The same layered graph built by other libraries, compared with hand-written constructors in the same interpreter.

All libraries run in one virtual environment, which pip fills in the cache folder on the first run. This file is also
the program that runs there. Libraries that copy referenced objects (hydra, confection) build pages without fallbacks.
"""

import importlib
import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NewType

import tomli

from drawloom.graph.project import Project
from support.cpu_time import cpu_ms
from support.layered import WIDTH, by_hand, by_recipe, recipe_text, serve
from support.shop.components.pages.plain import Plain
from support.shop.components.servers.loop import Loop
from support.shop.components.stores.memory import Memory

ROOT = Path(__file__).parents[2]
FOLDER = Path.home() / ".cache" / "drawloom" / f"graph-peers-{sys.version_info.major}.{sys.version_info.minor}"
PACKAGES = {
    "dependency-injector": "dependency-injector==4.49.1",
    "fiddle": "fiddle==0.3.1",
    "dishka": "dishka==1.10.1",
    "confection, flat": "confection==1.3.4",
    "hydra, flat": "hydra-core==1.3.8",
}
SIZES = (10, 100, 1000, 10000)
SECONDS = 30
"""Time limit for one library at one size."""


def tables(text: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the store's table and the pages' tables, for libraries without a file format."""
    data = tomli.loads(text)
    return data["store"], [table for name, table in data.items() if name.startswith("page")]


def by_drawloom(text: str) -> Any:
    return by_recipe(Project.from_package("support.shop"), text)


def by_dependency_injector(text: str) -> Any:
    providers: Any = importlib.import_module("dependency_injector.providers")
    kept, tabled = tables(text)
    store = providers.Singleton(Memory, size=kept["size"], name=kept["name"])
    pages: list[Any] = []
    for number, table in enumerate(tabled):
        below = {"fallback": pages[number - WIDTH]} if number >= WIDTH else {}
        pages.append(providers.Singleton(Plain, title=table["title"], store=store, **below))
    return providers.Singleton(serve, store=store, pages=providers.List(*pages))()


def by_fiddle(text: str) -> Any:
    fiddle: Any = importlib.import_module("fiddle")
    kept, tabled = tables(text)
    store, pages = fiddle.Config(Memory, size=kept["size"], name=kept["name"]), list[Any]()
    for number, table in enumerate(tabled):
        below = {"fallback": pages[number - WIDTH]} if number >= WIDTH else {}
        pages.append(fiddle.Config(Plain, title=table["title"], store=store, **below))
    return fiddle.build(fiddle.Config(serve, store=store, pages=pages))


def by_dishka(text: str) -> Any:
    """Build with one type per page, since dishka tells dependencies apart by type."""
    dishka: Any = importlib.import_module("dishka")
    kept, tabled = tables(text)
    provider = dishka.Provider(scope=dishka.Scope.APP)
    kinds = [NewType(f"Page{number}", Plain) for number in range(len(tabled))]
    provider.provide(lambda: Memory(size=kept["size"], name=kept["name"]), list_needed_ports_implemented_by=Memory)
    for number, table in enumerate(tabled):
        provider.provide(_factory(table["title"], kinds, number))
    container = dishka.make_container(provider)
    return serve(container.get(Memory), [container.get(kind) for kind in kinds])


def _factory(title: str, kinds: list[Any], number: int) -> Callable[..., Plain]:
    def first(store: Any) -> Plain:
        return Plain(title=title, store=store)

    def other(store: Any, fallback: Any) -> Plain:
        return Plain(title=title, store=store, fallback=fallback)

    factory: Callable[..., Plain] = other if number >= WIDTH else first
    below = {"fallback": kinds[number - WIDTH]} if number >= WIDTH else {}
    factory.__annotations__ = {"store": Memory, **below, "return": kinds[number]}
    return factory


def _path(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__name__}"


def by_hydra(text: str) -> Any:
    omegaconf: Any = importlib.import_module("omegaconf")
    instantiate: Any = importlib.import_module("hydra.utils").instantiate
    kept, tabled = tables(text)
    store = {"_target_": _path(Memory), "size": kept["size"], "name": kept["name"]}
    pages = [{"_target_": _path(Plain), "title": table["title"], "store": "${store}"} for table in tabled]
    server = {"_target_": _path(serve), "store": "${store}", "pages": pages}
    return instantiate(omegaconf.OmegaConf.create({"store": store, "server": server}).server, _convert_="all")


def _page(title: str, store: Any) -> Plain:
    return Plain(title=title, store=store)


def _serve(store: Any, pages: dict[str, Any]) -> Loop:
    return serve(store, [*pages.values()])


def by_confection(text: str) -> Any:
    confection: Any = importlib.import_module("confection")
    things = {"things": {"store": Memory, "page": _page, "server": _serve}}
    registry: Any = type("Registry", (confection.registry,), things)
    kept, tabled = tables(text)
    lines = [f'[store]\n@things = "store"\nsize = {kept["size"]}\nname = "{kept["name"]}"\n']
    lines.append('[server]\n@things = "server"\nstore = ${store}\n[server.pages]\n')
    for number, table in enumerate(tabled):
        lines.append(f'[server.pages.p{number}]\n@things = "page"\ntitle = "{table["title"]}"\nstore = ${{store}}\n')
    return registry.resolve(confection.Config().from_str("\n".join(lines)))["server"]


WAYS: dict[str, Callable[[str], Any]] = {
    "drawloom": by_drawloom,
    "dependency-injector": by_dependency_injector,
    "fiddle": by_fiddle,
    "dishka": by_dishka,
    "confection, flat": by_confection,
    "hydra, flat": by_hydra,
}


def measure(name: str, nodes: int) -> dict[str, Any]:
    """Return the milliseconds for a library and for the constructors, or why the library failed."""
    text = recipe_text(nodes)
    try:
        WAYS[name](text)  # imports, and objects that are built once
        return {"ms": cpu_ms(lambda: WAYS[name](text)), "hand": cpu_ms(lambda: by_hand(nodes))}
    except Exception as error:
        return {"why": type(error).__name__}


def prepare() -> Path:
    """Return the interpreter of the virtual environment. A library that pip cannot install is missing there."""
    python = FOLDER / "bin" / "python"
    if not python.exists():
        venv.create(FOLDER, with_pip=True)
    for packages in (["attrs", "cattrs", "tomli"], *([package] for package in PACKAGES.values())):
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
        subprocess.run(install, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=300, check=False)
    return python


def ask(python: Path, name: str, nodes: int) -> dict[str, Any]:
    """Run `measure` in a fresh interpreter."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in ("src", "tests"))}
    command = [str(python), __file__, name, str(nodes)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=True)
    except subprocess.TimeoutExpired:
        return {"why": f"> {SECONDS} s"}
    except subprocess.CalledProcessError as error:
        return {"why": f"exit code {error.returncode}"}
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def main() -> None:
    """Print a row per library: milliseconds and the ratio to the constructors, per node count."""
    try:
        python = prepare()
    except (OSError, subprocess.SubprocessError) as error:
        print(f"not measured, there is no virtual environment: {error}")
        return
    print(f"{'ms of CPU (x constructors)':26}" + "".join(f"{nodes:>20}" for nodes in SIZES))
    for name in WAYS:
        print(f"{name:26}" + "".join(f"{cell:>20}" for cell in _cells(python, name)), flush=True)


def _cells(python: Path, name: str) -> Iterator[str]:
    """Yield one cell per node count, up to the first failure."""
    for node_count in SIZES:
        figures = ask(python, name, node_count)
        if "why" in figures:
            yield figures["why"]
            return
        yield f"{figures['ms']:.1f} (x{figures['ms'] / figures['hand']:.0f})"


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
