"""What a checkpoint says of itself: the last file that is written, and the first that is believed."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from drawloom.components.checkpoint import files
from drawloom.components.checkpoint.files import Content
from drawloom.graph import UserError

FORMAT = 1
MANIFEST = "manifest.json"


class Damaged(Exception):
    """A checkpoint is not what was committed; the words say which files, and what is wrong with each."""


@attrs.frozen
class Manifest:
    """
    The step after which a checkpoint was saved, by which recipe, by how many ranks, and every file of it.

    `replicated` names the nodes whose state is the same on all ranks and held by rank 0, `local` those of which each
    rank has its own.
    """

    step: int
    recipe: str
    world_size: int
    replicated: list[str]
    local: list[str]
    files: dict[str, Content]

    def write(self) -> bytes:
        """The text of `manifest.json`."""
        content = {"format": FORMAT, **attrs.asdict(self)}
        return json.dumps({**content, "digest": _digest(content)}, indent=1).encode() + b"\n"


def read_manifest(checkpoint: Path) -> Manifest:
    """
    The manifest of a checkpoint.

    Raises Damaged if it is not as it was written, UserError if a newer version wrote it.
    """
    try:
        content = json.loads(files.read_file(checkpoint / MANIFEST))
        version, digest = content.pop("format"), content.pop("digest")
    except FileNotFoundError:
        raise Damaged(f"{MANIFEST} is missing") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Damaged(f"{MANIFEST} can't be read ({type(error).__name__})") from error
    if digest != _digest({"format": version, **content}):
        raise Damaged(f"{MANIFEST} does not have its own digest")
    if version != FORMAT:
        raise UserError(f"{checkpoint} has format {version}, and this version reads {FORMAT}; use the other version")
    manifest = _structure(content)
    if checkpoint.name != f"step-{manifest.step}":
        raise Damaged(f"{MANIFEST} is of step {manifest.step}")
    return manifest


def verify(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint of which every file is as it was committed; Damaged lists all that are not."""
    manifest = read_manifest(checkpoint)
    if faults := [*_faults_of_folder(checkpoint, manifest), *_faults_of_files(checkpoint, manifest)]:
        raise Damaged("; ".join(faults))
    return manifest


def read_listed(checkpoint: Path, manifest: Manifest, name: str) -> bytes:
    """What one of the files holds; Damaged if that is not what was committed."""
    if name not in manifest.files:
        raise Damaged(f"{MANIFEST} does not list {name}")
    try:
        data = files.read_file(checkpoint / name)
    except OSError as error:
        raise Damaged(f"{name} can't be read ({error.strerror})") from error
    found = Content(len(data), hashlib.sha256(data).hexdigest())
    if fault := _difference(name, found, manifest.files[name]):
        raise Damaged(fault)
    return data


def looks_whole(checkpoint: Path) -> bool:
    """Whether manifest, names and sizes are as they were committed: what can be seen without reading it all."""
    try:
        manifest = read_manifest(checkpoint)
        sizes = {name: (checkpoint / name).stat().st_size for name in manifest.files}
    except (Damaged, UserError, OSError):
        return False
    return all(sizes[name] == content.size for name, content in manifest.files.items())


def _structure(content: dict[str, Any]) -> Manifest:
    try:
        listed = {name: Content(**each) for name, each in content.pop("files").items()}
        manifest = Manifest(files=listed, **content)
    except (KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{MANIFEST} has other entries than a manifest has") from error
    if odd := [name for name in listed if Path(name).name != name or name in ("", ".", "..")]:
        raise Damaged(f"{MANIFEST} lists {odd[0]!r}, which is no plain file name")
    return manifest


def _digest(content: dict[str, Any]) -> str:
    """Of the content in one fixed way of writing, however the file writes it."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _faults_of_folder(checkpoint: Path, manifest: Manifest) -> Iterator[str]:
    found, listed = set(files.names(checkpoint)), {*manifest.files, MANIFEST}
    yield from (f"{name} is missing" for name in sorted(listed - found))
    yield from (f"{name} does not belong there" for name in sorted(found - listed))


def _faults_of_files(checkpoint: Path, manifest: Manifest) -> Iterator[str]:
    for name, committed in manifest.files.items():
        try:
            fault = _difference(name, files.content(checkpoint / name), committed)
        except FileNotFoundError:
            continue  # the folder's faults have it
        except OSError as error:
            fault = f"{name} can't be read ({error.strerror})"
        if fault:
            yield fault


def _difference(name: str, found: Content, committed: Content) -> str:
    if found.size != committed.size:
        return f"{name} has {found.size} bytes instead of {committed.size}"
    return "" if found == committed else f"{name} has other bytes than were committed"
