"""Runs with a mirror in an object store: a folder, and a real S3 server."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.runs import Outcome, drawloom, series

pytest.importorskip("fsspec", reason="needs the package fsspec: pip install 'drawloom[fsspec]'")
MIRROR = "listeners.mirror.use=checkpoint.mirror"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}


def drawloom_with(environment: dict[str, str], folder: Path, *words: str) -> Outcome:
    """Run a command; with variables, in a new Python."""
    if not environment:
        return drawloom(folder, *words)[0]
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-m", "drawloom", *words],
        cwd=folder,
        env={**os.environ, **environment, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return Outcome(done.returncode, done.stdout)


@pytest.fixture
def s3() -> Iterator[dict[str, str]]:
    """A real S3 server with the bucket `bucket`, and the variables of its clients."""
    pytest.importorskip("moto.server", reason="needs an S3 server: pip install 'moto[server]' s3fs")
    s3fs = pytest.importorskip("s3fs", reason="needs the package s3fs: pip install s3fs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "moto.server", "-p", str(port)]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while server.poll() is None and not _accepts(port):
            time.sleep(0.05)
        endpoint = f"http://127.0.0.1:{port}"
        s3fs.S3FileSystem(key="key", secret="secret", endpoint_url=endpoint).mkdir("bucket")
        yield {**CREDENTIALS, "AWS_ENDPOINT_URL": endpoint}
    finally:
        server.terminate()
        server.wait()


def _accepts(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def check_continues(folder: Path, url: str, environment: dict[str, str]) -> None:
    """
    Delete the local folder of a run. Started again, the run continues from the mirror, with the losses of a run that
    was not interrupted; commands read the mirror; another recipe is refused.
    """
    words = ["run", "tiny.toml", MIRROR, f"listeners.mirror.url={url}", "lr.use=learning_rate.constant"]
    first = drawloom_with(environment, folder, *words, "trainer.steps=4")
    assert first.code == 0 and "behind" not in first.text, first.text
    shutil.rmtree(folder / "runs/tiny")
    generated = drawloom_with(environment, folder, "generate", url, "--prompt", "def ", "--tokens", "4")
    assert generated.code == 0 and "def " in generated.text, generated.text
    refused = drawloom_with(environment, folder, *words, "model.hidden_size=32")
    assert refused.code == 2 and "holds a run of another recipe" in refused.text, refused.text
    shutil.rmtree(folder / "runs/tiny", ignore_errors=True)
    second = drawloom_with(environment, folder, *words, "trainer.steps=8")
    assert second.code == 0 and "resuming after step 4" in second.text, second.text
    straight = drawloom(folder, *words[:2], words[-1], "trainer.steps=8", "run.name=straight")[0]
    assert straight.code == 0, straight.text
    learned = ("step", "loss", "grad_norm", "lr", "tokens")
    assert series(folder / "runs/tiny", *learned) == series(folder / "runs/straight", *learned)


def test_a_run_goes_on_from_its_mirror(folder: Path) -> None:
    """The mirror is a folder, by fsspec's protocol `file`; `evaluate` prints its URL, not its temporary copy."""
    url = f"file://{folder}/store/tiny"
    check_continues(folder, url, {})
    [outcome] = drawloom(folder, "evaluate", url)
    assert f"{url}, step 8: loss " in outcome.text, outcome.text


@pytest.mark.soak  # every command starts Python
def test_a_run_goes_on_from_an_s3_server(folder: Path, s3: dict[str, str]) -> None:
    """The mirror is in a bucket of moto's server."""
    check_continues(folder, "s3://bucket/runs/tiny", s3)


def test_a_lost_mirror_stops_no_run(folder: Path) -> None:
    """A failing store is one warning, and the run ends as without a mirror."""
    (folder / "store").mkdir()
    (folder / "store/checkpoints").write_text("a file, in which no folder can be made", "utf-8")
    words = ["run", "tiny.toml", MIRROR, f"listeners.mirror.url=file://{folder}/store", "trainer.steps=4"]
    outcome = drawloom(folder, *words)[0]
    assert outcome.code == 0 and outcome.text.count("the mirror is behind") == 1, outcome.text
    assert (folder / "runs/tiny/checkpoints/step-4").is_dir()
