"""An editor without a screen: a language-server client over pipes."""

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcMethodNotFound
from pygls.lsp.client import LanguageClient

from drawloom.graph.lsp.workspace import Meaning

Write = Callable[[str, str], Path]
"""Types a text into a document; returns its path."""

Point = Callable[[str], Meaning]
"""Types a text with a bar into `mine.toml`; returns the answer at the bar."""

ROOT = Path(__file__).parents[2]
SHOP = "from drawloom.graph.project import Project; from drawloom.graph.lsp.server import serve_language_server;"
SHOP += "serve_language_server(Project.from_package('support.shop'))"
SECONDS = 60
"""For one answer; the first imports components."""


class Editor:
    """
    A folder in which documents are opened by name. The server is `drawloom lsp`, or the shop's.

    Positions are given by a text with a bar where the cursor is: `lr|`, which must be in the document once.
    """

    def __init__(self, folder: Path, *, shop: bool = True, options: Any = None, encoding: str = "utf-16") -> None:
        self.folder = folder
        self.client = LanguageClient("editor", "1")
        self.messages: list[str] = []
        self.diagnostics: dict[str, Sequence[lsp.Diagnostic]] = {}
        self.texts: dict[str, str] = {}
        self._command = ["-c", SHOP] if shop else ["-m", "drawloom", "lsp"]
        self._options = options
        self._encoding = encoding
        self._version = 0
        self._loop = asyncio.new_event_loop()

    def __enter__(self) -> "Editor":
        # A function, since pygls sets attributes of it.
        self.client.feature(lsp.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)(lambda params: self._take(params))
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), str(self.folder)])
        self.client.feature(lsp.WINDOW_SHOW_MESSAGE)(lambda params: self.messages.append(params.message))
        environment = os.environ | {"PYTHONPATH": path}
        self._run(self.client.start_io(sys.executable, *self._command, cwd=self.folder, env=environment))
        encodings = [lsp.PositionEncodingKind(self._encoding)]
        capabilities = lsp.ClientCapabilities(general=lsp.GeneralClientCapabilities(position_encodings=encodings))
        folders = [lsp.WorkspaceFolder(self.folder.as_uri(), "workspace")]
        parameters = lsp.InitializeParams(capabilities, workspace_folders=folders, initialization_options=self._options)
        self.server = self._run(self.client.initialize_async(parameters))
        self.client.initialized(lsp.InitializedParams())
        return self

    def __exit__(self, _kind: type | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        self._run(self.client.shutdown_async(None))
        self.client.exit(None)
        self._run(self.client.stop())  # type: ignore[no-untyped-call]
        self._loop.close()

    def _run(self, waiting: Any) -> Any:
        return self._loop.run_until_complete(asyncio.wait_for(waiting, SECONDS))

    def _take(self, params: lsp.PublishDiagnosticsParams) -> None:
        self.diagnostics[Path(params.uri).name] = params.diagnostics

    def type(self, name: str, text: str) -> list[str]:
        """Replace the whole text of a document, opening it first; return the problems marked by the server."""
        uri, self._version = self._uri(name), self._version + 1
        if name in self.texts:
            document = lsp.VersionedTextDocumentIdentifier(self._version, uri)
            changes = [lsp.TextDocumentContentChangeWholeDocument(text)]
            self.client.text_document_did_change(lsp.DidChangeTextDocumentParams(document, changes))
        else:
            item = lsp.TextDocumentItem(uri, "toml", self._version, text)
            self.client.text_document_did_open(lsp.DidOpenTextDocumentParams(item))
        self.texts[name] = text
        return self.problems(name)

    def close(self, name: str) -> None:
        """Close a document without saving it."""
        del self.texts[name]
        identifier = lsp.TextDocumentIdentifier(self._uri(name))
        self.client.text_document_did_close(lsp.DidCloseTextDocumentParams(identifier))

    def save_elsewhere(self, name: str, text: str) -> None:
        """Write a file as another program does, and notify the server."""
        (self.folder / name).write_text(text, "utf-8")
        event = lsp.FileEvent(self._uri(name), lsp.FileChangeType.Changed)
        self.client.workspace_did_change_watched_files(lsp.DidChangeWatchedFilesParams([event]))

    def problems(self, name: str) -> list[str]:
        """Return the problems marked in a document after all messages: `line:column-line:column message`, from 0."""
        self._run(self._wait_for_answer())
        return [
            f"{_format_range(diagnostic.range)} {diagnostic.message}" for diagnostic in self.diagnostics.get(name, ())
        ]

    async def _wait_for_answer(self) -> None:
        """Wait for an answer to a request, even if it is a refusal: the server answers in order."""
        with suppress(JsonRpcMethodNotFound):
            await self.client.protocol.send_request_async("drawloom/nothing", None)

    def ask(self, method: str, name: str, at: str, **more: Any) -> Any:
        """Return the answer to a request with a position, such as `hover`."""
        return self.ask_at(method, name, self._position(name, at), **more)

    def ask_at(self, method: str, name: str, position: lsp.Position, **more: Any) -> Any:
        """Return the answer to a request at a line and column, from 0."""
        identifier = lsp.TextDocumentIdentifier(self._uri(name))
        kind = {"references": lsp.ReferenceParams}.get(method)
        kind = kind or getattr(lsp, f"{method.title().replace('_', '')}Params")
        request = getattr(self.client, f"text_document_{method}_async")
        return self._run(request(kind(text_document=identifier, position=position, **more)))

    def _position(self, name: str, at: str) -> lsp.Position:
        before, after = at.split("|")
        text = self.texts[name]
        assert text.count(before + after) == 1, f"{before + after!r} is in the text {text.count(before + after)} times"
        start = text.index(before + after) + len(before)
        return lsp.Position(text.count("\n", 0, start), start - text.rfind("\n", 0, start) - 1)

    def _uri(self, name: str) -> str:
        return (self.folder / name).as_uri()


def _format_range(at: lsp.Range) -> str:
    return f"{at.start.line}:{at.start.character}-{at.end.line}:{at.end.character}"
