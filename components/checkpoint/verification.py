"""Read a checkpoint's manifest, and verify its files: untrusted content, which may be missing, changed or another's."""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from drawloom import UserError
from drawloom.components.checkpoint.manifest import FORMAT, MANIFEST, CorruptCheckpointError, Manifest
from drawloom.components.checkpoint.threads import map_parallel
from drawloom.components.storage.durable_files import list_folder, read_file
from drawloom.components.storage.sha256_stream import FileDigest, count_hash_blocks
from drawloom.components.storage.strict_json import hash_canonical, parse_strict_json
from drawloom.components.storage.verified_file import ContentMismatchError, open_file_to_verify

MAX_SIZE = 2**26  # bytes of a manifest, enough for 3 TB; larger files are not read into memory
READERS = 4  # files to read in parallel

NAME = re.compile(r"[A-Za-z0-9_.\-]{1,255}")
SHA256 = re.compile(r"[0-9a-f]{64}")


def read_manifest(checkpoint: Path) -> Manifest:
    """
    Return a checkpoint's manifest.

    Raises CorruptCheckpointError if it is invalid, UserError if another version of drawloom wrote it.
    """
    content = _read_verified_content(checkpoint)
    version = content.pop("format")
    if version != FORMAT:
        raise UserError(
            f"{checkpoint} has format {version}, and this version of drawloom reads format {FORMAT}; use the version "
            "that wrote it"
        )
    manifest = _parse_manifest(content)
    if checkpoint.name != f"step-{manifest.step}":
        raise CorruptCheckpointError(f"{MANIFEST} has step {manifest.step}, and the folder's name has another step")
    return manifest


def verify_checkpoint(checkpoint: Path) -> Manifest:
    """Verify every file, and return the manifest. Raises CorruptCheckpointError with every file that differs."""
    manifest = read_manifest(checkpoint)
    if faults := [
        *describe_missing_and_unknown_files(checkpoint, manifest),
        *describe_differing_blocks(checkpoint, manifest, block_numbers_by_file(manifest)),
    ]:
        raise CorruptCheckpointError("; ".join(faults))
    return manifest


def block_numbers_by_file(manifest: Manifest) -> dict[str, list[int]]:
    """Return every file's block numbers."""
    return {name: [*range(len(content.blocks))] for name, content in manifest.files.items()}


def describe_missing_and_unknown_files(checkpoint: Path, manifest: Manifest) -> Iterator[str]:
    """Describe missing files, and files missing from the manifest."""
    present, listed = set(list_folder(checkpoint)), {*manifest.files, MANIFEST}
    yield from (f"{name} is missing" for name in sorted(listed - present))
    yield from (f"{name} is not in the manifest" for name in sorted(present - listed))


def describe_differing_blocks(
    checkpoint: Path, manifest: Manifest, blocks: Mapping[str, Sequence[int]]
) -> Iterator[str]:
    """Describe how these blocks differ from the committed blocks; READERS files are read in parallel."""

    def find_fault_of_file(name: str) -> str:
        try:
            with open_file_to_verify(checkpoint / name, manifest.files[name]) as file:
                file.verify(blocks[name])
        except FileNotFoundError:
            return ""  # describe_missing_and_unknown_files reports it
        except OSError as error:
            return f"{name} can't be read ({error.strerror})"
        except ContentMismatchError as error:
            return f"{name} {error}"
        return ""

    yield from filter(None, map_parallel("verifier", [partial(find_fault_of_file, name) for name in blocks], READERS))


def read_manifest_if_sizes_match(checkpoint: Path) -> Manifest | None:
    """Return the manifest if it, all names and all sizes are as committed, else None. Files are not read."""
    try:
        manifest = read_manifest(checkpoint)
        sizes = {name: os.lstat(checkpoint / name).st_size for name in manifest.files}
    except (CorruptCheckpointError, UserError, OSError):
        return None
    return manifest if all(sizes[name] == content.size for name, content in manifest.files.items()) else None


def _read_verified_content(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest's content without its checksum, which is verified."""
    if checkpoint.is_symlink() or not checkpoint.is_dir():
        raise CorruptCheckpointError("it is a symbolic link, or not a folder")
    try:
        text = read_file(checkpoint / MANIFEST, MAX_SIZE)
        content: dict[str, Any] = parse_strict_json(text, max_values=len(text))
        digest = content.pop("digest")
        version = content["format"]
    except FileNotFoundError:
        raise CorruptCheckpointError(f"{MANIFEST} is missing") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptCheckpointError(f"{MANIFEST} can't be read ({type(error).__name__})") from error
    if digest != hash_canonical(content):
        raise CorruptCheckpointError(f"{MANIFEST} has a checksum mismatch")
    if type(version) is not int:
        raise CorruptCheckpointError(f"{MANIFEST} has a format that is not a number")
    return content


def _parse_manifest(content: dict[str, Any]) -> Manifest:
    if other := content.keys() ^ {field.name for field in attrs.fields(Manifest)}:
        raise CorruptCheckpointError(f"{MANIFEST} has missing or unknown entries: {', '.join(sorted(other))!r:.99}")
    if invalid := [name for name, fits in ENTRIES.items() if not fits(content[name])]:
        raise CorruptCheckpointError(f"{MANIFEST} has an invalid value of {invalid[0]!r}")
    files = {name: FileDigest(**fields) for name, fields in content.pop("files").items()}
    if unsafe := [name for name in files if not NAME.fullmatch(name) or name in (".", "..", MANIFEST)]:
        raise CorruptCheckpointError(f"{MANIFEST} lists {unsafe[0]!r:.99}, which is not a plain file name")
    return Manifest(files=files, **content)


def _is_nonnegative_integer(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _are_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_content_of_file(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"size", "blocks"}
        and _is_nonnegative_integer(value["size"])
        and _are_strings(value["blocks"])
        and len(value["blocks"]) == count_hash_blocks(value["size"])
        and all(map(SHA256.fullmatch, value["blocks"]))
    )


def _is_finite_metric_or_null(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and math.isfinite(value))


ENTRIES: Mapping[str, Callable[[Any], bool]] = {
    "step": _is_nonnegative_integer,
    "recipe": lambda value: isinstance(value, str),
    "world_size": lambda value: _is_nonnegative_integer(value) and value > 0,
    "replicated": _are_strings,
    "local": _are_strings,
    "sharded": _are_strings,
    "files": lambda value: isinstance(value, dict) and all(map(_is_content_of_file, value.values())),
    "values": lambda value: isinstance(value, dict) and all(map(_is_finite_metric_or_null, value.values())),
}
