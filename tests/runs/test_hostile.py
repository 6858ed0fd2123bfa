"""Forged recipes and checkpoints: they run no code, and nothing outside of their folders is read."""

import ast
import contextlib
import hashlib
import io
import json
import os
import pickle
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import drawloom
from drawloom.components.checkpoint.commit import hash_manifest
from drawloom.components.checkpoint.reader import load_node_state
from drawloom.graph import UserError
from drawloom.graph.cli.main import main
from support.audit import Audit, places
from support.checkpoints import LocalNode, ShardedNode, StateNode, checkpointer, save_steps
from support.processes import run_ranks

PACKAGE = Path(drawloom.__path__[0])

LIBRARIES = ("run.folder_lock", "ports.run", "commands.export")
"""Modules of drawloom without a component."""

NAMES = [
    *(
        "os.system",
        "builtins.eval",
        "builtins.exec",
        "subprocess.Popen",
        "torch.hub.load",
        "torch.load",
        "pickle.loads",
    ),
    *("importlib.import_module", "runpy.run_path", "webbrowser.open", "antigravity", "this", "code.interact"),
    *(
        "drawloom.components.run.job",
        "drawloom.graph.cli.main.main",
        "components.run.job",
        "graph.cli",
        "kernels.linear",
    ),
    *("__import__('os').system('touch owned')", "run.job.__class__", "run.job.__init__.__globals__", "run.__init__"),
    *(
        "../evil",
        "..evil",
        ".evil",
        "/tmp/evil",
        "run/../../evil",
        "evil.py",
        "run.job;import os",
        "run.job\\nimport os",
    ),
    *("data.text_files ", " data.text_files", "data․text_files", "dаta.text_files", "DATA.text_files", "data..bytes"),
    *LIBRARIES,
    *("logging.os.system", "hydra.utils.get_class", "", "use"),
]

RECIPES = [
    *(f'[evil]\nuse = {json.dumps(name)}\ncommand = "touch owned"\n' for name in NAMES),
    *(f"extends = {json.dumps(path)}\n" for path in ("/etc/passwd", "../../../../etc/passwd", "file:///etc/passwd")),
    *(f"extends = {json.dumps(path)}\n" for path in ("http://127.0.0.1:1/x.toml", "os", "evil.py", "pipe")),
    'extends = "first_run"\n[trainer]\nphases = ["@evil"]\n[evil]\nuse = "os.system"\n',
    'extends = "first_run"\n[clip]\nuse = "torch.nn.utils.clip_grad_norm_"\nmax_norm = "__import__(\'os\')"\n',
    'extends = "first_run"\n[run]\nname = "../../../../tmp/evil"\n',
    'extends = "first_run"\n[run]\nname = "{__class__.__init__.__globals__}"\nseed = "$vars.__class__"\n',
    '[vars]\na = "$vars.b"\nb = "$vars.a"\n[evil]\nuse = "$vars.a"\n',
    "a = " + "[" * 500 + "]" * 500 + "\n",
    ".".join("a" * 3000) + " = 1\n",
    "[evil]\nuse = 9" + "9" * 6000 + "\n",
]
"""Recipes that must all be refused."""


def _check_all(folder: Path) -> tuple[list[str], list[tuple[str, int, float]]]:
    """Check every recipe; return the audit's findings, and the output, exit code and seconds per recipe."""
    os.chdir(folder)
    os.mkfifo(folder / "pipe")
    (folder / "evil.py").write_text("open('owned', 'w')\n")
    (folder / "fine.toml").write_text('extends = "first_run"\n')
    installed = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]  # plug-ins are found here
    ours = [path.resolve() for path in PACKAGE.iterdir() if path.is_dir()]
    audit = Audit([*places(folder, PACKAGE, *ours, *installed), *(path + os.sep for path in sys.path if path)])
    audit.install()
    ends: list[tuple[str, int, float]] = []
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as printed:
        main(["check", "fine.toml"])  # imports all components and the modules beside them
        main(["check", "fine.toml", "optimizer.learning_rate=1"])  # reads the names of other frameworks
        for name in LIBRARIES:
            (folder / "evil.toml").write_text(f'[evil]\nuse = "{name}"\n')
            main(["check", "evil.toml"])
        for recipe in RECIPES:
            (folder / "evil.toml").write_text(recipe, "utf-8")
            printed.truncate(0)
            began = time.monotonic()
            audit.on = True
            code = main(["check", "evil.toml"])
            audit.on = False
            ends.append((printed.getvalue(), code, time.monotonic() - began))
    return audit.found, ends


def test_a_hostile_recipe_runs_nothing_and_reads_nothing(tmp_path: Path) -> None:
    """Forged names, paths and bombs are refused with an error, within seconds and without any effect."""
    findings, ends = run_ranks(_check_all, 1, tmp_path, variables=False)[0]
    assert findings == []
    assert len(NAMES) >= 40
    for recipe, (printed, code, seconds) in zip(RECIPES, ends, strict=True):
        assert code == 2, recipe
        assert printed and "Traceback" not in printed, recipe
        assert seconds < 2, recipe
    assert not (tmp_path / "owned").exists()


class Payload:
    """An object whose pickle runs code."""

    def __reduce__(self) -> Any:
        return os.system, ("touch owned",)


def _update_digests(checkpoint: Path, **changes: Any) -> None:
    """Update a checkpoint's manifest to match its files."""
    content = json.loads((checkpoint / "manifest.json").read_text())
    for name in content["files"]:
        data = b""
        with contextlib.suppress(OSError):
            data = (checkpoint / name).read_bytes() if (checkpoint / name).is_file() else b""
        content["files"][name] = {"size": len(data), "blocks": [hashlib.sha256(data).hexdigest()]}
    content |= changes
    del content["digest"]
    (checkpoint / "manifest.json").write_text(json.dumps(content | {"digest": hash_manifest(content)}))


def _write(name: str, data: bytes) -> Callable[[Path], None]:
    def hostile(checkpoint: Path) -> None:
        (checkpoint / name).write_bytes(data)
        if name != "manifest.json":
            _update_digests(checkpoint)

    return hostile


def _tree(tree: Any, file: str = "rank-0.safetensors") -> Callable[[Path], None]:
    tensors = {file: ["memory/weight", "../../../secret"]}
    return _write("rank-0.json", json.dumps({"tensors": tensors, "state": tree}).encode())


def _header(header: Any, body: bytes = b"") -> Callable[[Path], None]:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return _write("rank-0.safetensors", len(text).to_bytes(8, "little") + text + body)


def _link(name: str, target: str) -> Callable[[Path], None]:
    def hostile(checkpoint: Path) -> None:
        (checkpoint / name).unlink()
        (checkpoint / name).symlink_to(target)
        if name != "manifest.json":
            _update_digests(checkpoint)

    return hostile


def _put_pipe(checkpoint: Path) -> None:
    (checkpoint / "rank-0.safetensors").unlink()
    os.mkfifo(checkpoint / "rank-0.safetensors")


def _link_folder(checkpoint: Path) -> None:
    elsewhere = checkpoint.parents[2] / "elsewhere" / checkpoint.name
    elsewhere.parent.mkdir()
    checkpoint.rename(elsewhere)
    checkpoint.symlink_to(elsewhere)


def _list_outside_file(checkpoint: Path) -> None:
    secret = {"size": 6, "blocks": [hashlib.sha256(b"secret").hexdigest()]}
    _update_digests(checkpoint, files={"../../../secret": secret})


def _f32(*shape: int, start: int = 0, end: int | None = None) -> dict[str, Any]:
    return {"dtype": "F32", "shape": list(shape), "data_offsets": [start, 4 if end is None else end]}


NODE = {"dict": {"memory": {"dict": {"weight": {"tensor": "../../../secret"}}}}}

CHECKPOINTS: list[Callable[[Path], None]] = [
    *(_write(name, pickle.dumps(Payload())) for name in ("rank-0.json", "rank-0.safetensors", "manifest.json")),
    *(
        _link(name, "/etc/passwd")
        for name in ("rank-0.json", "rank-0.safetensors", "recipe.lock.toml", "manifest.json")
    ),
    *(_link("rank-0.safetensors", target) for target in ("../../../secret", "/dev/zero", "/proc/self/mem")),
    *(_put_pipe, _link_folder, _list_outside_file),
    _tree(NODE),
    _tree({"dict": {"memory": {"reduce": ["os", "system", "touch owned"]}}}),
    _tree({"dict": {"memory": {"dict": {"weight": {"tensor": ["memory/weight"]}}}}}),
    _tree({"dict": {"memory": {"dict": {"weight": {"float": "__import__('os')"}}}}}),
    _tree({"dict": {"memory": []}}),
    _tree([]),
    _tree({"dict": {"memory": {"dict": {"weight": {"tensor": "memory/weight"}}}}}, "../../../secret"),
    _write("rank-0.json", b'{"tensors": {"rank-0.safetensors": "memory/weight"}, "state": {"dict": {}}}'),
    _write("rank-0.json", b'{"tensors": [], "state": {"dict": {}}}'),
    _write("rank-0.json", b"[]"),
    _write("rank-0.json", b"[" * 10**6),
    _write("rank-0.json", b'{"tensors": {}, "state": {"dict": {"memory": {"dict": {}}, "memory": {"dict": {}}}}}'),
    _write("rank-0.json", b'{"tensors": {}, "state": {"dict": {"memory": {"dict": {"x": NaN}}}}}'),
    _header(b"", b""),
    _header({"memory/weight": _f32(2**40, 2**40)}, bytes(4)),
    _header({"memory/weight": _f32(1, start=0, end=2**60)}, bytes(4)),
    _header({"../../secret": _f32(1)}, bytes(4)),
    _header({"memory/weight": _f32(*[1] * 5000)}, bytes(4)),
    _header(b'{"a":' * 100_000, b""),
    _write("rank-0.safetensors", (2**62).to_bytes(8, "little") + b"{}"),
]


def _load_all(folder: Path) -> tuple[list[str], list[tuple[str, float]]]:
    """Restore every hostile checkpoint; return the audit's findings, and the errors and seconds per checkpoint."""
    os.chdir(folder)
    (folder / "secret").write_text("secret")
    save_steps(folder / "good", 1)
    with contextlib.suppress(UserError):  # imports the modules that are imported late
        _restore(folder / "good", StateNode())
    audit, ends = Audit([]), list[tuple[str, float]]()
    audit.install()
    for number, hostile in enumerate(CHECKPOINTS):
        run = folder / f"run-{number}"
        shutil.copytree(folder / "good", run)
        checkpoint = run / "checkpoints/step-1"
        hostile(checkpoint)
        audit.inside, began, errors = places(run), time.monotonic(), []
        audit.on = True
        for node in (StateNode(), LocalNode(), ShardedNode({}, names=["weight"])):
            errors.append(_refusal(partial(_restore, run, node)))
        with contextlib.suppress(UserError):  # reads only the files that it needs
            load_node_state(checkpoint, "memory")
        audit.on = False
        ends.append((" | ".join(errors), time.monotonic() - began))
    return audit.found, ends


def _restore(run: Path, node: StateNode) -> None:
    checkpointer(run, {"memory": node}).restore()


def _refusal(work: Callable[[], Any]) -> str:
    """Return the message of the error that `work` raises."""
    try:
        work()
    except UserError as error:
        return str(error)
    return "accepted"


def test_a_hostile_checkpoint_runs_nothing_and_reads_nothing(tmp_path: Path) -> None:
    """
    Every loader refuses checkpoints with valid checksums but hostile content, within seconds, and names the file.

    Hostile content: pickles, links, pipes, devices, names that lead outside, and headers and trees that are bombs.
    """
    findings, ends = run_ranks(_load_all, 1, tmp_path, variables=False)[0]
    assert findings == []
    for number, (message, seconds) in enumerate(ends):
        assert "accepted" not in message, (number, message)
        assert "step-1" in message and any(name in message for name in ("rank-0", "manifest.json", "recipe", "link"))
        assert seconds < 4, (number, seconds)
    assert not (tmp_path / "owned").exists()


PICKLING = {"pickle", "_pickle", "cPickle", "shelve", "marshal", "dill", "cloudpickle", "joblib"}
PICKLES = {"load", "save", "async_save", "FileSystemWriter", "FileSystemReader"}


def _find_pickling(path: Path) -> list[str]:
    """List a module's imports of pickling packages, torch's load and save, and collectives of objects."""
    sites = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            sites += [name.name for name in node.names if name.name.split(".")[0] in PICKLING]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PICKLING:
            sites.append(str(node.module))
        elif isinstance(node, ast.Attribute):
            is_torch = isinstance(node.value, ast.Name) and node.value.id in ("torch", "dcp")
            if (is_torch and node.attr in PICKLES) or node.attr.endswith(("_object", "_object_list")):
                sites.append(node.attr)
    return sites


def test_nothing_is_pickled_between_ranks_or_in_files() -> None:
    """Only the data loader and `drawloom prove` pickle, for their own workers, which no other process can reach."""
    root = Path(__file__).parents[2]
    sources = [path for floor in ("components", "graph", "kernels") for path in (root / floor).rglob("*.py")]
    workers = {"components/data/workers.py", "components/proving/ranks.py"}
    assert {str(path.relative_to(root)) for path in sources if _find_pickling(path)} == workers


@pytest.mark.parametrize("size", [0, 100])
def test_the_audit_detects_misbehaviour(tmp_path: Path, size: int) -> None:
    """The audit detects a pickle that is read, a file opened outside and an imported module."""
    findings = run_ranks(_misbehave, 1, tmp_path, size, variables=False)[0]
    assert {line.split()[0] for line in findings} >= {"pickle.find_class", "open", "import", "exec"}


def _misbehave(folder: Path, size: int) -> list[str]:
    (folder / "evil.py").write_text("x = 1\n")
    audit = Audit(places(folder / "inside"))
    audit.install()
    audit.on = True
    pickle.loads(pickle.dumps(StateNode({"a": "b" * size})))
    (folder / "outside").write_text("")
    sys.path.insert(0, str(folder))
    __import__("evil")
    exec("1")
    audit.on = False
    return audit.found
