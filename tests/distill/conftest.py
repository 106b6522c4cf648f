"""A byte-level tokenizer with the chat markup of the families whose templates matter here, and a small run."""

import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from seergate.distill import TrainConfig, load_train_config, run_distillation, trainer
from seergate.distill.callbacks import EvalLog, StepLog
from seergate.distill.checkpoint import newest_checkpoint
from seergate.distill.sources import open_source

PLAIN = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor -%}"""

# Qwen3: the last assistant turn keeps its reasoning, and a turn without any gets an empty one.
QWEN3 = """\
{%- for m in messages -%}
{%- set content, reasoning = m.content, '' -%}
{%- if m.role == 'assistant' and '</think>' in content -%}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and loop.last %}{{ '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}{% endif -%}
{{ content + '<|im_end|>\\n' }}
{%- endfor -%}"""

# R1-Distill: what stands before the end of the reasoning is deleted.
R1 = """\
{{ bos_token }}{% for m in messages %}
{%- if m.role == 'user' %}{{ '<｜User｜>' + m.content }}{% endif %}
{%- if m.role == 'assistant' %}{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] }}
{{- '<｜end▁of▁sentence｜>' }}{% endif %}
{%- endfor %}"""

# gpt-oss: each turn is in a channel, and reasoning is a key of the last turn.
GPT_OSS = """\
{%- for m in messages -%}
{%- if m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}{% else -%}
{%- if loop.last and 'thinking' in m -%}
{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
{%- endif -%}
{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}
{%- endif -%}
{%- endfor -%}"""

TEMPLATES = {"plain": PLAIN, "qwen3": QWEN3, "r1": R1}


def byte_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """One token per byte; no text is out of its vocabulary."""
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **special)


@pytest.fixture(params=sorted(TEMPLATES))
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    """Every chat markup in turn."""
    return byte_tokenizer(TEMPLATES[request.param])


@pytest.fixture
def plain() -> PreTrainedTokenizerFast:
    """The plain chat markup."""
    return byte_tokenizer(PLAIN)


@pytest.fixture
def data_config(tmp_path: Path) -> TrainConfig:
    """A run on a local file, with its own token cache."""
    options = {"recipe": "paper", "data": str(tmp_path / "rows.jsonl"), "max_length": 1024, "block_size": 8}
    return load_train_config("someone/model", options | {"token_cache": str(tmp_path / "cache")})


@pytest.fixture(scope="session", name="model_dir")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as `from_pretrained` wants it; peaked attention, so that there is something to learn."""
    directory = tmp_path_factory.mktemp("qwen3")
    tokenizer = byte_tokenizer(PLAIN)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    config = Qwen3Config(vocab_size=len(tokenizer), initializer_range=0.2, **shape)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(name="config")
def run_config(model_dir: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A small run on that model, with the token cache of all tests."""
    places = {"output_dir": str(tmp_path / "run"), "token_cache": str(tmp_path_factory.getbasetemp() / "tokens")}
    data = {"data": "chain_sum", "data_limit": 80, "chain_sum_variables": (5, 12), "max_length": 768, "eval_packs": 2}
    steps = {"max_steps": 8, "packs_per_step": 2, "warmup_steps": 2, "save_steps": 3, "eval_steps": 4}
    options = {"recipe": "paper", "block_size": 16, "learning_rate": 1e-2, "recall_budgets": (32, 128)}
    return load_train_config(str(model_dir), {**places, **data, **steps, **options})


def watched_steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, list[Any]]]:
    """Whether gates learned from each forward of the frozen model, and which, as they come."""
    real, seen = trainer.distill_steps, []

    def distill_steps(specs: Any, *rest: Any) -> Any:
        seen.append((torch.is_grad_enabled(), list(specs)))
        return real(specs, *rest)

    monkeypatch.setattr(trainer, "distill_steps", distill_steps)
    return seen


class Recorder:
    """Keeps what it hears, and can stop the run as a kill would: between two steps, unannounced."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.steps: list[StepLog] = []
        self.evals: list[EvalLog] = []
        self.messages: list[str] = []
        self.stop_after = stop_after

    def on_message(self, text: str) -> None:
        self.messages.append(text)

    def on_step(self, log: StepLog) -> None:
        self.steps.append(log)
        if log.step == self.stop_after:
            raise KeyboardInterrupt

    def on_eval(self, log: EvalLog) -> None:
        self.evals.append(log)

    def close(self) -> None:
        pass


def trained(config: TrainConfig, **changes: Any) -> tuple[Path, Recorder]:
    """Run it with these options; its directory, and what was heard."""
    heard = Recorder()
    return run_distillation(replace(config, **changes), [heard]), heard


class Signalled(Recorder):
    """Signals its own process at a step or an evaluation."""

    def __init__(self, step: int, *numbers: signal.Signals, event: str = "step") -> None:
        super().__init__()
        self.at, self.numbers = (event, step), numbers

    def _signal(self, event: str, log: Any) -> None:
        if (event, log.step) == self.at:
            for number in self.numbers:
                signal.raise_signal(number)

    def on_step(self, log: StepLog) -> None:
        super().on_step(log)
        self._signal("step", log)

    def on_eval(self, log: EvalLog) -> None:
        super().on_eval(log)
        self._signal("eval", log)


def weights(directory: Path | str) -> dict[str, torch.Tensor]:
    return load_file(Path(directory) / "gate_model.safetensors")


def assert_identical(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def state(run: Path) -> dict[str, torch.Tensor]:
    """The tensors of a run's newest checkpoint."""
    return load_file(Path(str(newest_checkpoint(run / "checkpoints"))) / "state.safetensors")


def assert_same(run: Path, other: Path) -> None:
    """Gates, the best ones, and the newest checkpoints are equal bit for bit."""
    for part in (".", "best"):
        assert_identical(weights(run / part), weights(other / part))
    assert_identical(state(run), state(other))


def scalars(run: Path, name: str = "loss") -> list[tuple[int, float]]:
    """Steps and values of a curve, as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


@pytest.fixture(name="pushes")
def commit_pushes(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """Every dataset on the Hub gets a commit whenever one looks. The runs of which data were read: drawn ones."""
    commits: Iterator[str] = (digit * 40 for digit in "abcdef")
    opened: list[TrainConfig] = []

    def source(config: TrainConfig, cache: Path) -> Any:
        opened.append(config)
        return open_source(replace(config, data="chain_sum", data_revision=None), cache)

    monkeypatch.setattr("huggingface_hub.dataset_info", lambda *_, **__: SimpleNamespace(sha=next(commits)))
    monkeypatch.setattr("seergate.distill.data.open_source", source)
    return opened
