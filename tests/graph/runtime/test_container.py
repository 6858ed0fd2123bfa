"""Containers of built and opened objects."""

import gc
import operator
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawloom.graph.cli.commands.training.run import format_timings
from drawloom.graph.lifecycle import NodeTiming
from drawloom.graph.problems import ReopenError, UserError
from drawloom.graph.project import Project
from drawloom.graph.runtime.opened import NamedExitStack, time_lifecycle
from drawloom.graph.wiring.graph import Graph
from support.shop.components.stores.disk import Disk

Shop = Callable[..., Graph]

DISKS = """
[store]
use = "stores.disk"
folder = "first"
{first}

[second]
use = "stores.disk"
folder = "second"
{second}

[other]
use = "pages.plain"
store = "@second"
title = "Other"

[page]
store = "@store"

[trainer]
store = "@store"
pages = ["@page", "@other"]
"""


def disk_recipe(first: str = "", second: str = "") -> str:
    """Return a recipe with two disk stores that fail at a stage."""
    fails = [f'fails = "{stage}"' if stage else "" for stage in (first, second)]
    return DISKS.format(first=fails[0], second=fails[1])


def test_one_table_is_one_object(shop: Shop, project: Project) -> None:
    """All nodes that refer to a table have the same object."""
    with project.container(shop()) as objects:
        assert objects["page"].store is objects["trainer"].store is objects["store"]


def test_only_dependencies_of_the_root_are_built(shop: Shop, project: Project) -> None:
    """A node that the root does not need is not built."""
    graph = shop('[spare]\nuse = "pages.plain"\ntitle = "Spare"')
    with project.container(graph) as objects:
        assert set(objects) == {"store", "page", "trainer"}
    with project.container(graph, "spare") as objects:
        assert set(objects) == {"store", "spare"}


def test_every_built_node_of_a_kind_is_filled_in(shop: Shop, project: Project) -> None:
    """A field of type Every has the built nodes that implement its port, by name."""
    with project.container(shop()) as objects:
        assert dict(objects["trainer"].counted) == {"page": objects["page"]}


def test_the_resolved_recipe_is_filled_in(shop: Shop, project: Project) -> None:
    """A field of type ResolvedRecipe has the recipe's text and hash."""
    with project.container(shop()) as objects:
        recipe = objects["trainer"].recipe
    assert '[page]\nuse = "pages.plain"' in recipe.text and len(recipe.hash) == 64


def test_opening_and_closing_go_in_opposite_orders(shop: Shop, project: Project) -> None:
    """Nodes are closed once, in reverse opening order."""
    order: list[str] = []
    container = project.container(shop(disk_recipe()))
    container.build()
    with container as objects:
        for name in ("store", "second"):
            objects[name].journal = Journal(name, order)
    assert order == ["second close", "store close"]


class Journal(list[str]):
    """A list that appends to a common list instead."""

    def __init__(self, name: str, order: list[str]) -> None:
        super().__init__()
        self.name, self.order = name, order

    def append(self, stage: str) -> None:
        self.order.append(f"{self.name} {stage}")


def test_a_failure_while_opening_closes_open_nodes(shop: Shop, project: Project) -> None:
    """If a node fails to open, it and the nodes opened before are closed, and its error is raised."""
    container = project.container(shop(disk_recipe(second="open")))
    with pytest.raises(RuntimeError, match="second can't open"), container:
        pass
    assert container["store"].journal == container["second"].journal == ["open", "close"]


def test_nodes_are_opened_and_closed_in_the_contexts_of_all_others(
    shop: Shop, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node's stage context surrounds opening and closing of all other nodes, and not its own."""
    happened: list[str] = []

    @contextmanager
    def watch(disk: Disk, stage: str, node: str) -> Iterator[None]:
        happened.append(f"{disk.folder} sees {node} {stage}")
        yield
        happened.append(f"{disk.folder} saw {node} {stage}")

    monkeypatch.setattr(Disk, "lifecycle_context", watch, raising=False)
    with project.container(shop(disk_recipe())):
        happened.append("open")
    seen = [text for text in happened if "sees" in text or text == "open"]
    assert seen == [
        "second sees store open",
        "first sees second open",
        "open",
        "first sees second close",
        "second sees store close",
    ]
    assert [text for text in happened if "saw" in text] == [
        text.replace("sees", "saw") for text in seen if text != "open"
    ]


def test_a_user_error_while_opening_names_node_and_position(shop: Shop, project: Project, monkeypatch: Any) -> None:
    """A UserError's message starts with the node and its position in the recipe."""
    graph = shop(disk_recipe())
    monkeypatch.setattr(graph.nodes["second"].spec.cls, "open", _refuse)
    with pytest.raises(UserError, match=r"^override: \[s[a-z]+\] there is no such folder$"), project.container(graph):
        pass


def _record_failures(container: Any, replacement: BaseException | None = None) -> list[str]:
    """Register failure handlers, one of which returns an exception; return a list for later events."""
    container.build()
    happened: list[str] = []
    kind = type(container["store"])

    def record_failure(disk: Any, error: BaseException) -> BaseException | None:
        name = "store" if disk.folder == Path("first") else "second"
        happened.append(f"{name} hears {error}")
        disk.journal = Journal(name, happened)
        return replacement if name == "second" else None

    kind.on_failure = record_failure
    return happened


@pytest.fixture
def reset_stores() -> Iterator[None]:
    """Remove failure handlers from stores after the test."""
    yield
    kind: Any = Disk
    if "on_failure" in vars(kind):
        del kind.on_failure


def test_failure_handlers_run_before_anything_is_closed(reset_stores: None, shop: Shop, project: Project) -> None:
    """Handlers run in reverse opening order, and an exception that one returns replaces the error."""
    container = project.container(shop(disk_recipe()))
    happened = _record_failures(container, SystemExit(3))
    with pytest.raises(SystemExit) as caught, container:
        raise ValueError("the cause")
    assert happened == ["second hears the cause", "store hears 3", "second close", "store close"]
    assert caught.value.code == 3 and isinstance(caught.value.__cause__, ValueError)


def test_a_failure_while_opening_calls_the_handlers_of_open_objects(
    reset_stores: None, shop: Shop, project: Project
) -> None:
    """Handlers of open objects and the failing object are called, and its error is raised."""
    container = project.container(shop(disk_recipe(second="open")))
    happened = _record_failures(container)
    with pytest.raises(RuntimeError, match="second can't open"), container:
        pass
    assert happened == [
        "second hears second can't open",
        "store hears second can't open",
        "second close",
        "store close",
    ]


def test_nodes_hand_values_over_to_their_successors(
    reset_stores: None, shop: Shop, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a request to reopen, values are read before anything closes, and passed on before anything opens."""
    container = project.container(shop(disk_recipe()))
    happened = _record_failures(container, ReopenError("again"))

    def hand_over(disk: Disk) -> Path:
        happened.append(f"{disk.folder} hands over")
        return Path(disk.folder)

    monkeypatch.setattr(Disk, "hand_over", hand_over, raising=False)
    monkeypatch.setattr(Disk, "take_over", lambda _, values: happened.append(f"gets {values}"), raising=False)
    with pytest.raises(ReopenError) as caught, container:
        raise ValueError("the cause")
    assert happened[2:] == ["first hands over", "second hands over", "second close", "store close"]
    assert caught.value.handed_over == {"store": Path("first"), "second": Path("second")}
    successor = project.container(shop(disk_recipe()))
    successor.handed_over = {"second": "a value"}
    monkeypatch.setattr(Disk, "open", lambda _: happened.append("open"))
    with successor:
        assert happened[6:] == ["gets a value", "open", "open"] and successor.handed_over == {}


@pytest.mark.parametrize("error", [None, ReopenError("again"), UserError("full")])
def test_closed_nodes_are_freed_without_a_collection(shop: Shop, project: Project, error: Exception | None) -> None:
    """Fields of type Every make no cycle any more, so nodes hidden from the collector (`gc.freeze`) are freed, too."""
    container = project.container(shop())
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with suppress(ReopenError, UserError), container:
            container["trainer"].counted["trainer"] = container["trainer"]
            trainer = weakref.ref(container["trainer"])
            if error is not None:
                raise error.with_traceback(None)
        del container
        assert trainer() is None
    finally:
        if was_enabled:
            gc.enable()


def test_without_a_failure_no_handler_is_called(reset_stores: None, shop: Shop, project: Project) -> None:
    """A container that closes without an error calls no failure handler."""
    container = project.container(shop(disk_recipe()))
    happened = _record_failures(container)
    with container:
        pass
    assert happened == []


def _refuse(_disk: Any) -> None:
    raise UserError("there is no such folder")


def test_the_body_error_is_raised_with_closing_failures_as_notes(shop: Shop, project: Project) -> None:
    """The body's exception is raised, every closer runs, and their exceptions are notes."""
    container = project.container(shop(disk_recipe(first="close", second="close")))
    with pytest.raises(KeyboardInterrupt) as caught, container:
        raise KeyboardInterrupt
    assert ["second" in note or "store" in note for note in caught.value.__notes__] == [True, True]


def test_closing_that_fails_after_a_clean_body_is_a_group(shop: Shop, project: Project) -> None:
    """If only closing fails, an ExceptionGroup has all failures."""
    with pytest.raises(ExceptionGroup) as caught, project.container(shop(disk_recipe(first="close", second="close"))):
        pass
    assert len(caught.value.exceptions) == 2


def test_a_constructor_that_fails_names_its_node(shop: Shop, project: Project, monkeypatch: Any) -> None:
    """A note on a constructor's exception names the node and its position."""
    graph = shop()
    monkeypatch.setattr(graph.nodes["page"].spec.cls, "__attrs_post_init__", _fail, raising=False)
    cls = graph.nodes["page"].spec.cls
    monkeypatch.setattr(cls, "__init__", lambda self, **values: _fail(self))
    with pytest.raises(ValueError, match="no page") as caught, project.container(graph):
        pass
    assert "while building [page] (pages.plain)" in caught.value.__notes__[0]


def _fail(_page: Any) -> None:
    raise ValueError("no page today")


def test_two_containers_share_nothing(shop: Shop, project: Project) -> None:
    """Two containers of one graph have different objects."""
    graph = shop()
    with project.container(graph) as one, project.container(graph) as other:
        assert not {id(item) for item in one.values()} & {id(item) for item in other.values()}


def test_two_containers_of_one_graph_share_no_setting(shop: Shop, project: Project) -> None:
    """An object that changes its list settings changes neither the graph nor other containers."""
    graph = shop(disk_recipe())
    with project.container(graph) as one:
        assert one["store"].journal == ["open"]
        with project.container(graph) as other:
            assert other["store"].journal == ["open"]
    assert graph.nodes["store"].settings["journal"] == []


def test_a_graph_does_not_change(shop: Shop) -> None:
    """Nodes, settings and edges are read-only, and `with_values` returns another graph."""
    graph = shop()
    for change in (
        lambda: setattr(graph, "nodes", {}),
        lambda: setattr(graph.nodes["store"], "settings", {}),
        lambda: operator.setitem(graph.nodes, "x", None),  # type: ignore[call-overload]
        lambda: operator.setitem(graph.nodes["store"].settings, "size", 3),  # type: ignore[call-overload]
        lambda: operator.setitem(graph.nodes["page"].edges, "store", None),  # type: ignore[call-overload]
    ):
        with pytest.raises((AttributeError, TypeError)):
            change()
    other = graph.with_values({"store": {"size": 3}})
    assert (graph.nodes["store"].settings["size"], other.nodes["store"].settings["size"]) == (10, 3)


class Till:
    """A store for replacements."""

    def get(self, key: str) -> Any:
        return key

    def put(self, key: str, value: Any) -> None: ...

    def close(self) -> None:
        raise AssertionError("a replacement must not be closed")


def test_a_replacement_is_used_in_place_of_a_node(shop: Shop, project: Project) -> None:
    """Nodes that only the replaced node needs are not built, and the replacement is not opened or closed."""
    till = Till()
    graph = shop(disk_recipe())
    with project.container(graph, "page", replacements={"store": till}) as objects:
        assert objects["page"].store is till
        assert set(objects) == {"page", "store"}


def test_a_replacement_must_implement_the_ports(shop: Shop, project: Project) -> None:
    """A replacement is checked against the ports of its edges, and its name against the nodes."""
    with pytest.raises(
        TypeError, match=r"replacement for \[store\] does not implement the port of \[page\] store: it has no get\(\)"
    ):
        project.container(shop(), replacements={"store": object()}).build()
    with pytest.raises(ValueError, match="there is no node 'stor' to replace; did you mean 'store'"):
        project.container(shop(), replacements={"stor": Till()}).build()


def test_a_node_that_only_optional_edges_lead_to_can_be_left_out(shop: Shop, project: Project) -> None:
    """None replaces a node with optional edges only, and is refused for a required edge."""
    graph = shop('[other]\nuse = "pages.plain"\ntitle = "Other"\n[page]\nfallback = "@other"')
    with project.container(graph, "page", replacements={"other": None}) as objects:
        assert objects["page"].fallback is None and objects["other"] is None
    with pytest.raises(TypeError, match=r"replacement for \[store\] does not implement the port of \[page\] store"):
        project.container(graph, "page", replacements={"store": None}).build()


def test_a_node_that_is_left_out_is_missing_from_lists(shop: Shop, project: Project) -> None:
    """A list has the other nodes, in order."""
    graph = shop('[other]\nuse = "pages.plain"\ntitle = "Other"\n[trainer]\npages = ["@other", "@page"]')
    with project.container(graph, replacements={"other": None}) as objects:
        assert objects["trainer"].pages == [objects["page"]]


def test_a_replacement_need_not_fit_nodes_that_are_not_built(shop: Shop, project: Project) -> None:
    """A replacement must implement only the ports of edges in the built part of the graph."""
    graph = shop('[menu]\nuse = "pages.menu"\nlinks = {}\nbackup = "@page"\n[trainer]\npages = ["@page", "@menu"]')
    till = Till()  # [menu] accepts a page or a store, and [trainer] pages only
    with project.container(graph, "menu", replacements={"page": till}) as objects:
        assert objects["menu"].backup is till


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interruption_is_raised_as_itself(shop: Shop, project: Project, stop: type[BaseException]) -> None:
    """KeyboardInterrupt and SystemExit are not wrapped in an ExceptionGroup, even if closing fails."""
    with pytest.raises(stop), project.container(shop(disk_recipe(second="close"))):
        raise stop


def test_every_node_is_timed(shop: Shop, project: Project) -> None:
    """A built node has a timing for building, and for opening and closing if it has these methods."""
    with project.container(shop(disk_recipe())) as objects:
        pass
    stages = [(timing.node, timing.stage) for timing in objects.timings]
    assert [name for name, stage in stages if stage == "build"] == list(objects)
    assert [stage for name, stage in stages if name == "second"] == ["build", "open", "close"]
    assert [stage for name, stage in stages if name == "page"] == ["build"]


FAILURES: list[type[BaseException] | None] = [None, ValueError, KeyboardInterrupt, SystemExit]


def make_stack(failures: list[type[BaseException] | None], closed: list[int]) -> NamedExitStack:
    """Return a stack of closers that record their calls and then raise."""
    stack = NamedExitStack()
    for number, failure in enumerate(failures):

        def close(number: int = number, failure: type[BaseException] | None = failure) -> None:
            closed.append(number)
            if failure:
                raise failure(f"number {number}")

        stack.push_callback(f"thing{number}", close)
    return stack


@given(st.lists(st.sampled_from(FAILURES), max_size=6), st.sampled_from([None, ValueError, KeyboardInterrupt]))
def test_every_closer_runs_and_nothing_is_lost(
    failures: list[type[BaseException] | None], cause: type[BaseException] | None
) -> None:
    """Closers run last in, first out, and every failure is raised or is a note on the raised exception."""
    closed: list[int] = []
    body = cause("body") if cause else None
    stack = make_stack(failures, closed)
    raised: BaseException | None = None
    try:
        stack.close_all(body)
    except BaseException as error:
        raised = error
    assert closed == list(reversed(range(len(failures))))
    failed = [f"number {number}" for number in closed if failures[number]]
    stops = [number for number in closed if failures[number] in (KeyboardInterrupt, SystemExit)]
    if body is not None:
        assert raised is None and other_failures(body) == failed
    elif stops:
        assert type(raised) is failures[stops[0]] and str(raised) == f"number {stops[0]}"
        assert other_failures(raised) == [text for text in failed if text != str(raised)]
    elif failed:
        assert isinstance(raised, ExceptionGroup) and [str(error) for error in raised.exceptions] == failed
    else:
        assert raised is None
    stack.close_all(None)  # nothing is closed twice
    assert len(closed) == len(failures)


def other_failures(error: BaseException | None) -> list[str]:
    """List the other failures in an exception's notes."""
    notes = getattr(error, "__notes__", [])
    return [note.split(": ")[2].split(" (")[0] for note in notes if note.startswith("then: ")]


def test_a_failure_names_the_node_that_was_closing() -> None:
    """A note on every exception of a group names the node."""
    with pytest.raises(ExceptionGroup) as caught:
        make_stack([ValueError], []).close_all(None)
    assert caught.value.exceptions[0].__notes__ == ["while closing [thing0]"]


def test_the_timing_table_sums_fast_nodes_in_one_line() -> None:
    """The table lists nodes by total time, all nodes below a millisecond in one line, and the sum."""
    timings = [
        NodeTiming("model", "build", 0.0, 0.25),
        NodeTiming("data", "open", 0.3, 1.5),
        NodeTiming("data", "close", 2.0, 0.5),
        NodeTiming("job", "build", 0.0, 0.0004),
        NodeTiming("mesh", "open", 0.0, 0.0003),
    ]
    assert format_timings(timings).splitlines() == [
        "ms           build      open     close",
        "[data]         0.0    1500.0     500.0",
        "[model]      250.0       0.0       0.0",
        "2 others       0.4       0.3       0.0",
        "all          250.4    1500.3     500.0",
    ]


def test_a_stage_that_fails_is_timed() -> None:
    """A failed stage has a timing."""
    timings: list[NodeTiming] = []
    with pytest.raises(ValueError, match="no"), time_lifecycle(timings, "x", "open"):
        raise ValueError("no")
    assert [(timing.node, timing.stage) for timing in timings] == [("x", "open")] and timings[0].seconds >= 0
