"""A real HTTP server with OpenAI's completions API over a small model of ours, as vLLM serves it."""

import base64
import io
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import attrs
import numpy
import torch
from torch import Tensor, nn

from drawloom.components.model.auto import AutoModel
from drawloom.components.ports.experts import ExpertRouter
from drawloom.components.ports.model import LayerRange, TokenContext
from support.qwen3 import cpu_kernels, logits_of
from support.weight_folders import fill_module_from_folder

Answer = tuple[int, Any]
"""A status and a JSON value."""


@attrs.define
class ServedModel:
    """A model that a folder's weights are loaded into; `requests` has every route with its body."""

    name: str = "policy"
    is_raw: bool = False
    returns_routes: bool = False
    module: nn.Module | None = None
    version: str = "default"
    requests: list[tuple[str, Any]] = attrs.field(factory=list)
    fault: Callable[[str, Any], Answer | None] = lambda path, body: None
    change: Callable[[dict[str, Any]], Any] = lambda choice: choice
    lock: threading.Lock = attrs.field(factory=threading.Lock)
    waiting: int = 0
    most_waiting: int = 0
    url: str = ""
    layers: dict[int, Tensor] = attrs.field(factory=dict)

    def answer(self, path: str, body: Any) -> Answer:
        """Return the answer to a request; one is computed at a time."""
        if path == "/weight_info":
            self.requests.append((path, body))
            return self.fault(path, body) or (200, {"weight_version": self.version})
        self.waiting += 1
        self.most_waiting = max(self.waiting, self.most_waiting)
        try:
            return self._answer_in_turn(path, body)
        finally:
            self.waiting -= 1

    def _answer_in_turn(self, path: str, body: Any) -> Answer:
        with self.lock:
            self.requests.append((path, body))
            if (fault := self.fault(path, body)) is not None:
                return fault
            match path:
                case "/v1/models":
                    return 200, {"object": "list", "data": [{"id": self.name}]}
                case "/collective_rpc":
                    assert body["method"] == "reload_weights"
                    self.load(Path(body["kwargs"]["weights_path"]))
                    return 200, {"results": [None]}
                case "/reset_prefix_cache":
                    return 200, None
                case "/update_weight_version":
                    self.version = body["new_version"]
                    return 200, None
                case "/v1/completions" if body["model"] == self.name:
                    generator = torch.Generator().manual_seed(body["seed"])
                    choices = [{**self.complete(body, generator), "index": index} for index in range(body["n"])]
                    return 200, {"object": "text_completion", "choices": [*map(self.change, choices[::-1])]}
            return 404, {"error": {"message": f"{path}: not found"}}

    def restart(self) -> None:
        """Forget the weights of the run."""
        assert self.module is not None
        for parameter in self.module.parameters():
            nn.init.normal_(parameter)
        self.version = "default"

    def load(self, folder: Path) -> None:
        """Load a Hugging Face folder's weights, in float32."""
        model = AutoModel(kernels=cpu_kernels(), path=folder)
        self.module = model.build(LayerRange.of_whole_model(model.num_hidden_layers))
        fill_module_from_folder(folder, self.module, model.hugging_face_mapper().inverse())
        self.layers = {}
        for name, router in self.module.named_modules() if self.returns_routes else ():
            if isinstance(router, ExpertRouter):
                self._record_other_choices(int(name.split(".")[2]), router)

    def _record_other_choices(self, layer: int, router: Any) -> None:
        """Let a router sometimes choose other experts, and record them."""
        choose = router.choose_experts

        def choose_and_record(scores: Tensor) -> Tensor:
            self.layers[layer] = choose(scores + 0.05 * (1000 * scores).sin())
            return self.layers[layer]

        router.choose_experts = choose_and_record

    def encode_routes(self) -> str:
        """Return the last pass's experts as vLLM does: (tokens, layers, choices), of all layers, from 0."""
        choices = next(iter(self.layers.values())).view(-1, 2)
        routes = [self.layers.get(layer, choices * 0).view(-1, 2) for layer in range(max(self.layers) + 1)]
        file = io.BytesIO()
        numpy.save(file, torch.stack(routes, 1).to(torch.uint8).numpy())
        return base64.b64encode(file.getvalue()).decode()

    @torch.no_grad()
    def complete(self, body: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
        """Sample one completion, each token by a pass over the whole text."""
        ids, start = [*body["prompt"]], len(body["prompt"])
        logps: list[float] = []
        tops: list[dict[str, float]] = []
        while len(ids) < start + body["max_tokens"]:
            logits = self.logits(torch.tensor([ids]))[0, -1]
            scaled = (logits / body["temperature"]).log_softmax(-1)
            shown = logits.log_softmax(-1) if self.is_raw else scaled
            token = int(torch.multinomial(scaled.exp(), 1, generator=generator))
            best = shown.topk(body["logprobs"])
            tops.append({f"token_id:{number}": float(shown[number]) for number in (*best.indices.tolist(), token)})
            logps.append(float(shown[token]))
            ids.append(token)
            if token in body.get("stop_token_ids", ()):
                break
        tokens = [f"token_id:{number}" for number in ids[start:]]
        logprobs = {"tokens": tokens, "token_logprobs": logps, "top_logprobs": tops}
        routes = {"routed_experts": self.encode_routes()} if self.returns_routes else {}
        return {**routes, "text": "", "token_ids": ids[start:], "logprobs": logprobs}

    def logits(self, tokens: Tensor) -> Any:
        """Return the logits of rows of tokens."""
        assert self.module is not None
        places = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
        return logits_of(self.module, tokens, TokenContext(places, torch.zeros_like(tokens)))


class Server(ThreadingHTTPServer):
    """A server that prints nothing when a client has gone."""

    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


@contextmanager
def serve(port: int = 0, **options: Any) -> Iterator[ServedModel]:
    """Serve a model at a port of this machine, by default a free one, until the context ends."""
    model = ServedModel(**options)

    class Handler(BaseHTTPRequestHandler):
        """Handler of requests with JSON bodies."""

        def do_POST(self) -> None:
            size = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(size) or b"null")
            status, value = model.answer(self.path, body)
            content = b"" if value is None else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST

        def log_message(self, format: str, *arguments: Any) -> None:
            """Print nothing."""

    server = Server(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    model.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield model
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@cache
def get_shared_server() -> ServedModel:
    """Return a server that runs until the process ends."""
    context = serve()
    SHARED.append(context)  # closing it would stop the server
    return context.__enter__()


SHARED: list[Any] = []
"""Contexts of servers that run until the process ends."""
