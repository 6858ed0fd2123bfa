"""The registry of components."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from drawloom.graph.component import NAME
from drawloom.graph.problems import Problem
from drawloom.graph.project import Project
from drawloom.graph.recipe.merged import MergedRecipe
from drawloom.graph.registry.registry import EntryPointSource, PackageSource

for _name in ("types.describe", "types.mismatches", "registry.suggestions", "toml.diagnosis"):
    import_module(f"drawloom.graph.{_name}")  # a process imports it with its first problem

SECRET = '''
"""A module that no test may import."""

raise SystemExit("imported")
'''

HOSTILE = [
    "os",
    "os.system",
    "builtins.eval",
    "subprocess.Popen",
    "torch.hub.load",
    "importlib.import_module",
    "secret",
    "secret.thing",
    "secret:thing",
    "support.shop.secret",
    "..secret",
    ".secret",
    "../secret",
    "/tmp/secret",
    "stores.memory:os.system",
    "stores.memory.os",
    "stores.memory.attrs",
    "stores.memory.__class__",
    "stores.memory.__init__.__globals__",
    "__init__",
    "__main__.main",
    "stores.__init__",
    "stores.__pycache__.memory",
    "stores/memory",
    "stores.memory\n",
    "stores.memory ",
    "stores.memory\u200b",
    "ѕtores.memory",
    "STORES.MEMORY",
    "stores..memory",
    "stores.memory.",
    ".stores.memory",
    "stores.memory\x00",
    "stores.memory.py",
    "~/stores.memory",
    "${HOME}.x",
    "{0.__class__}",
    "%s.%s",
    "`id`.x",
    "$(id).x",
    "file:///etc/passwd",
    "https://example.com/x.y",
    "!!python/object/apply:os.system",
    "stores.memory; import os",
    "lambda: 0",
    "a" * 10_000 + ".b",
    ".".join(["a"] * 200),
]


@pytest.fixture
def audit_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Record imports and executions, with a secret module on the import path."""
    (tmp_path / "secret.py").write_text(SECRET, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    seen: list[str] = []
    active = [True]

    def listen(event: str, arguments: tuple[Any, ...]) -> None:
        if not active[0]:
            return
        if event == "import":
            seen.append(str(arguments[0]))
        elif event.startswith(("os.system", "os.exec", "os.posix_spawn", "subprocess", "socket", "shutil")):
            seen.append(event)

    Project.from_package("support.shop").graph(
        MergedRecipe.from_values({"a": {"use": "nobody.knows"}})
    )  # imports the modules of any recipe
    sys.addaudithook(listen)
    yield seen
    active[0] = False


def recipes_with(text: str) -> list[dict[str, Any]]:
    """Return recipes with a text at every position that accepts one."""
    shop: dict[str, Any] = {"use": "stores.memory"}
    return [
        {"a": {"use": text}},
        {text: shop},
        {"group": {text: shop}},
        {"a": shop | {"name": text}},
        {"a": shop | {text: 1}},
        {"a": {"use": "pages.plain", "title": text, "store": f"@{text}"}},
        {"a": {"use": "pages.plain", "title": "x", "store": {"use": text}}},
        {"a": {"use": "pages.plain", "title": "x", "fallback": text, "filters": [f"@{text}", f"@{text}.*", text]}},
        {"a": {"use": "pages.menu", "links": {text: f"@{text}"}, "first": text, "show": [text]}},
        {"vars": {text: text}, "a": shop | {"name": f"$vars.{text}"}},
        {"unset": [text], "a": shop},
        {"a": {"use": "stores.varied", "path": text, "anything": {text: [text]}}},
    ]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text)[:40])
def test_a_recipe_imports_nothing_but_components(text: str, audit_events: list[str]) -> None:
    """No string in a recipe imports or runs anything but a shipped component."""
    project = Project.from_package("support.shop")
    for data in recipes_with(text):
        project.graph(MergedRecipe.from_values(data), root="")
    strange = [name for name in audit_events if not name.startswith("support.shop.")]
    assert strange == []
    assert not [name for name in audit_events if name.startswith("support.shop.secret")]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text)[:40])
def test_no_hostile_name_is_found(text: str) -> None:
    """A hostile name has no candidates, because names are looked up among files before any import."""
    assert PackageSource.from_package("support.shop.components").find_candidates(text) == []


def test_a_name_leads_to_the_module_of_its_path() -> None:
    """A folder lists its components by dotted path, and each name loads its class."""
    folder = PackageSource.from_package("support.shop.components")
    assert "stores.memory" in folder.names() and "servers.table" not in folder.names()
    assert all(NAME.fullmatch(name) for name in folder.names())
    (holder,) = folder.find_candidates("stores.memory")
    assert [cls.__name__ for cls in holder.load()] == ["Memory"]


def declare(folder: Path, distribution: str, **entries: str) -> None:
    """Write the metadata of an installed distribution with entry points into a folder."""
    info = folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n", "utf-8")
    lines = [f"{name.replace('__', '.')} = {value}" for name, value in entries.items()]
    (info / "entry_points.txt").write_text("\n".join(["[support.shop.components]", *lines, ""]), "utf-8")


STORE = '''
"""A store of a third party."""

from drawloom.graph import component


@component
class Shed:
    """Keeps things in a shed."""

    def get(self, key): ...

    def put(self, key, value): ...


class Plain:
    """Not a component."""
'''


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder on Python's path with a third-party module."""
    (tmp_path / "third_party.py").write_text(STORE, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "third_party", raising=False)
    return tmp_path


def problems(data: dict[str, Any]) -> list[str]:
    """Return a shop recipe's problems."""
    return [
        f"{p.code} {p.text}"
        for p in Project.from_package("support.shop").graph(MergedRecipe.from_values(data), root="").errors
    ]


@pytest.mark.parametrize(
    ("use", "hint"),
    [
        ("optim.adan", "did you mean 'optim.adam'?"),
        ("optim.adamW", "did you mean 'optim.adamw'?"),
        ("data.text", "did you mean 'data.text_files'?"),
        ("CrossEntropy", "did you mean 'loss.next_token'?"),
        ("gpt-oss", "did you mean 'model.gpt_oss'?"),
        (
            "ZeroBubble",
            "did you mean 'pipeline.schedules.zero_bubble_1p' or 'pipeline.schedules.zero_bubble_h2' or "
            "'pipeline.schedules.zero_bubble_v'?",
        ),
        ("data.concatenated", "did you mean 'data.packing.concatenated'?"),
        (
            "optim.lion",
            "the components beside it are optim.adam, optim.adamw, optim.muon, optim.sgd, optim.stochastic_adamw",
        ),
        ("data.mmap", "`drawloom list data` lists the components"),
    ],
)
def test_names_in_a_folder_are_compared_by_their_last_words(use: str, hint: str) -> None:
    """Names in a folder are compared by their last words; if none is near, the hint lists the folder."""
    problem = Project.from_package("drawloom").registry.find(use)
    assert isinstance(problem, Problem) and problem.hint == hint


def test_an_entry_point_is_a_component(elsewhere: Path) -> None:
    """A component of an installed distribution is used by its name, and shows its distribution."""
    declare(elsewhere, "acme-sheds", garden__shed="third_party:Shed")
    project = Project.from_package("support.shop")
    graph = project.graph(MergedRecipe.from_values({"store": {"use": "garden.shed"}}), root="")
    assert graph.errors == []
    assert graph.nodes["store"].spec.distribution == "acme-sheds 1.0"
    assert "garden.shed" in project.registry.names()


def test_an_entry_point_is_imported_only_when_it_is_used(elsewhere: Path) -> None:
    """Listing names and checking recipes without a third-party component do not import its module."""
    declare(elsewhere, "acme-sheds", garden__shed="third_party:Shed")
    assert "garden.shed" in Project.from_package("support.shop").registry.names()
    assert problems({"store": {"use": "stores.memory"}}) == []
    assert "third_party" not in sys.modules


def test_a_name_in_two_distributions_is_a_problem_that_names_both(elsewhere: Path) -> None:
    """If two distributions, or a distribution and drawloom, have a component with the same name, it is a problem."""
    declare(elsewhere, "acme-sheds", garden__shed="third_party:Shed", stores__memory="third_party:Shed")
    declare(elsewhere, "other-sheds", garden__shed="third_party:Shed")
    (clash,) = problems({"store": {"use": "garden.shed"}})
    assert clash.startswith("DL207 'garden.shed' is provided by ")
    assert "acme-sheds 1.0" in clash and "other-sheds 1.0" in clash
    (own,) = problems({"store": {"use": "stores.memory"}})
    assert own == "DL207 'stores.memory' is provided by support.shop.components and acme-sheds 1.0"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("third_party:Plain", "DL203 'garden.shed' is not a component, but third_party:Plain"),
        ("third_party:Missing", "DL205 'garden.shed' can't be imported: AttributeError: "),
        ("no_such_party:Shed", "DL205 'garden.shed' can't be imported: ModuleNotFoundError: "),
    ],
)
def test_a_bad_entry_point_is_a_problem(elsewhere: Path, value: str, text: str) -> None:
    """An entry point that does not lead to a component is a problem."""
    declare(elsewhere, "acme-sheds", garden__shed=value)
    (problem,) = problems({"store": {"use": "garden.shed"}})
    assert problem.startswith(text)


def test_names_that_no_component_can_have_are_left_out(elsewhere: Path) -> None:
    """An entry point without a subject is not a component's name."""
    declare(elsewhere, "acme-sheds", shed="third_party:Shed")
    assert EntryPointSource("support.shop.components").names() == []


@pytest.mark.parametrize(
    ("use", "hint"),
    [
        ("torch.stores.Memory", "did you mean 'stores.memory'?"),
        ("pytest.stores.memry", "did you mean 'stores.memory'? Otherwise, to use the components of the package"),
        ("pytest.other.memory", "to use the components of the package 'pytest', add --import pytest"),
    ],
)
def test_the_path_of_a_class_elsewhere_names_the_component_like_it(use: str, hint: str) -> None:
    """A class path with a known folder and name suggests the component, and another path suggests --import."""
    [error] = (
        Project.from_package("support.shop").graph(MergedRecipe.from_values({"store": {"use": use}}), root="").errors
    )
    assert error.hint.startswith(hint)


def test_import_offers_the_components_of_a_package(elsewhere: Path) -> None:
    """Components below a package have their dotted paths as names with `--import PACKAGE` only."""
    (elsewhere / "my_sheds").mkdir()
    (elsewhere / "my_sheds" / "__init__.py").write_text("", "utf-8")
    (elsewhere / "my_sheds" / "small.py").write_text(STORE, "utf-8")
    recipe = MergedRecipe.from_values({"store": {"use": "my_sheds.small"}})
    plain = Project.from_package("support.shop")
    assert [p.code for p in plain.graph(recipe, root="").errors] == ["DL201"]
    importing = plain.with_imports(["my_sheds"])
    assert importing.graph(recipe, root="").errors == []
    assert "my_sheds.small" in importing.registry.names() and "my_sheds.small" not in plain.registry.names()
