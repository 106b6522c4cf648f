"""The plugin where it has to find its own way in: worker processes of two ranks, and a server."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.serving.vllm.conftest import answers, engine
from tests.support.pairs import free_port
from tests.support.reasoner import GATES, REASONER, questions

GATE = {"gates": GATES, "token_budget": 256}
ENVIRONMENT = {**os.environ, "VLLM_LOGGING_LEVEL": "INFO", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with engine(seergate=GATE) as llm:
        return answers(llm, questions(12, 20, 16, 14), 400)


@pytest.mark.timeout(600)
def test_two_ranks(expected: list[list[int]], tmp_path: Path) -> None:
    """The model has two KV heads: each rank has one, and its part of the gates."""
    options = json.dumps({"seergate": GATE, "tensor_parallel_size": 2})
    environment = {**ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": "0|1" if os.cpu_count() > 1 else "nobind"}
    command = [sys.executable, "-m", "tests.serving.vllm.parallel", options, str(tmp_path / "said.json")]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr[-4000:]
    result = json.loads((tmp_path / "said.json").read_text())
    assert result["said"] == expected
    first, second = (stats["layers"] for stats in result["stats"])
    assert first == second
    assert all(layer["density"] < 0.9 for layer in first.values())


@contextmanager
def served(port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server, ready to answer. Not by ``vllm serve``: vllm-cpu's looks for a package named vllm, and ends."""
    import urllib.request

    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", REASONER),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"),
        *("--additional-config", json.dumps({"seergate": GATE})),
    ]
    environment = {**ENVIRONMENT, "VLLM_LOG_STATS_INTERVAL": "1"}
    with log.open("ab") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
                break
            except OSError:
                assert process.poll() is None, log.read_text()[-4000:]
                time.sleep(1)
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the server and its engine, with no time to tidy up
        process.wait()


@pytest.mark.timeout(900)
def test_a_server_asked_by_the_openai_client_killed_and_restarted(expected: list[list[int]], tmp_path: Path) -> None:
    from openai import OpenAI
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(REASONER)
    prompts = questions(12, 20, 16, 14)
    texts = [tokenizer.decode(tokens, skip_special_tokens=True).strip() for tokens in expected]
    port = free_port()
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=120)

    def completion(ids: list[int], **options: Any) -> Any:
        return client.completions.create(model=REASONER, prompt=ids, max_tokens=400, temperature=0, **options)

    log = tmp_path / "server.log"
    for _ in range(2):
        with served(port, log):
            assert [completion(ids).choices[0].text.strip() for ids in prompts[:2]] == texts[:2]
            streamed = "".join(chunk.choices[0].text for chunk in completion(prompts[2], stream=True))
            assert streamed.strip() == texts[2]
    assert log.read_text().count("seergate: decoding reads") >= 2
