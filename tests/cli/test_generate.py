"""`seergate generate`: streams an answer, writes the page, and refuses what cannot be before it reads any weight."""

import json
import shutil

import pytest
from transformers import AutoTokenizer

from seergate.cli.generate import TINY_BUDGET
from seergate.eval import Problem, make_task
from seergate.eval.settings import method_spec
from seergate.eval.tasks.prompts import encode, prompt_text
from seergate.methods import METHODS, SelectingMethod
from seergate.models.names import bank_for
from seergate.paths import shipped
from tests.eval.report.test_explorer import page_of
from tests.support.running import output_of, refusal, run_seergate


def test_the_tiny_reasoner_answers_and_shows_what_it_read(tmp_path):
    command = "generate", "--trace", str(tmp_path / "read.html"), "--max-new-tokens"
    output_of(*command, "2")
    done = run_seergate(*command, "250")  # its own page is written again
    assert done.returncode == 0, done.stderr
    assert f"\ngates: {shipped('checkpoints/tiny-reasoner/gates')}, beside the model" in done.stderr
    answer = make_task("chain_sum", problems=1, variables=16).problems()[0].gold
    assert done.stdout.split()[-3:] == ["\\boxed{", answer, "}"]
    assert f"% of the tokens before it; the right answer is {answer}\nwhat was read:" in done.stderr
    assert done.stderr.startswith("[a26] is just the digit 5 ,"), "what was asked"
    page = page_of(tmp_path / "read.html")
    assert "".join(page["tokens"][page["prompt"] :]).split()[:-1] == done.stdout.split()
    assert (page["name"], page["nominal"], len(page["cells"])) == ("gate", "128", 8)
    assert (page["steps"][-1][0].sum(1) == 128 / page["block_size"]).all()


def test_the_default_budget_fits_every_method_that_selects():
    bank = bank_for("tiny-reasoner", None)
    for name in (name for name, kind in METHODS.items() if issubclass(kind, SelectingMethod)):
        spec = method_spec(name, default_budget=TINY_BUDGET)
        assert spec.method(bank if spec.has_gates else None).token_budget == TINY_BUDGET


@pytest.mark.filterwarnings("always:h2o. a prompt has:UserWarning")
def test_a_prompt_a_method_and_a_file(saved, tmp_path):
    (tmp_path / "prompt.txt").write_text("a1 is the sum of a2 plus a3 .")
    outputs = []
    options = ["--method", "h2o:interval=2", "--budget", "4", "--max-new-tokens", "9", "--temperature", "1"]
    for given in (["--prompt", "a1 is the sum of a2 plus a3 ."], ["--prompt-file", str(tmp_path / "prompt.txt")]):
        done = run_seergate("generate", "--model", saved, *given, *options)
        assert done.returncode == 0 and "9 tokens in" in done.stderr, done.stderr
        assert done.stderr.startswith("note: h2o: a prompt has"), "a warning is a line of its own"
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1] != "", "the seed decides what is drawn"
    assert "the right answer" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is no prompt; give --prompt TEXT or --prompt-file FILE"),
        (["--prompt", " "], "the prompt is empty"),
        (["--prompt", "a \udcff b"], "the prompt is not UTF-8 text"),
        (["--prompt-file", "nowhere.txt"], "the prompt nowhere.txt cannot be read"),
        (["--prompt", "a1", "--trace", "own.txt/read.html"], "own.txt is a file; the output needs a directory"),
        (["--prompt", "a1", "--trace", "."], "--trace is .; it must name a file that ends in .html"),
        (["--prompt", "a1", "--trace", "own.txt"], "--trace is own.txt; it must name a file that ends in .html"),
        (["--prompt", "a1", "--trace", "x.html", "--method", "h2o"], "'h2o' selects none"),
        (["--prompt", "a1", "--trace", "x.html", "--method", "dense"], "quest and oracle, which reads what dense"),
        (["--prompt", "a1", "--trace", "x.html", "--max-new-tokens", "1"], "--trace shows later ones"),
        (["--prompt", "a1", "--max-new-tokens", "0"], "max_new_tokens is 0; it must be a whole number, 1 or greater"),
        (["--prompt", "a1 " * 5000], "the prompt has 5,00"),
        (["--prompt", "a1", "--temperature", "-1"], "temperature is -1.0; it must be 0"),
        (["--prompt", "a1", "--temperature", "nan"], "temperature is nan; it must be 0"),
        (["--prompt", "a1", "--method", "quset"], "did you mean 'quest'"),
        (["--prompt", "a1", "--method", "gate"], "needs gates"),
        (["--prompt", "a1", "--method", "quest", "--token-budget", "-3"], "token_budget is -3"),
        (["--prompt", "a1", "--method", "quest:dense_layers=7"], "dense_layers names [7]"),
        (["--prompt", "a1", "--method", "quest:anchors=7"], "anchors names [7]"),
        (["--prompt", "a1", "--method", "gate", "--gates", str(shipped("checkpoints/smollm2-135m"))], "another model"),
        (["--prompt", "a1", "--model", "no-such-model"], "no-such-model"),
        (["--prompt", "a1"], "could not be loaded"),
    ],
)
def test_what_is_refused_before_weights_are_read(arguments, message, weightless, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.txt").write_text("mine")
    method = [] if "--method" in arguments else ["--method", "quest"]
    assert message in refusal(run_seergate("generate", "--model", str(weightless), *method, *arguments))
    assert not (tmp_path / "x.html").exists() and (tmp_path / "own.txt").read_text() == "mine"


def test_a_long_prompt_is_announced_and_threads_are_set(saved, monkeypatch):
    threads = []
    monkeypatch.setattr("torch.set_num_threads", threads.append)
    command = ["generate", "--model", saved, "--method", "quest", "--budget", "128", "--max-new-tokens", "2"]
    done = run_seergate(*command, "--prompt", "a1 " * 1200, "--threads", "3")
    assert done.returncode == 0 and done.stderr.startswith("reading the prompt of 1,20"), done.stderr
    assert 3 in threads
    done = run_seergate(*command, "--prompt", "a1")
    assert done.returncode == 0 and "reading the prompt" not in done.stderr


def test_the_models_configuration_changes_the_sampling_only(saved, tmp_path):
    """One answer with a cache, which ends at the tokenizer's end token, too."""
    configured, page = shutil.copytree(saved, tmp_path / "configured"), tmp_path / "read.html"
    command = ["generate", "--method", "quest", "--budget", "128", "--prompt", "a2 plus", "--max-new-tokens", "9"]
    plain = output_of(*command, "--model", saved)
    values = {"use_cache": False, "num_beams": 3, "num_return_sequences": 2, "return_dict_in_generate": True}
    values |= {"cache_implementation": "offloaded", "eos_token_id": 5}
    (configured / "generation_config.json").write_text(json.dumps(values))
    done = run_seergate(*command, "--model", str(configured), "--trace", str(page))
    assert done.returncode == 0 and done.stdout == plain, done.stderr
    assert "9 tokens in" in done.stderr and page_of(page)["name"] == "quest"
    tokenizer = AutoTokenizer.from_pretrained(saved)
    tokenizer.eos_token = plain.split()[0]
    tokenizer.save_pretrained(configured)
    done = run_seergate(*command, "--model", str(configured))
    assert done.returncode == 0 and "1 tokens in" in done.stderr, done.stderr


def test_the_blocks_that_a_sharing_method_reads_are_shown(tmp_path):
    page = tmp_path / "read.html"
    output_of("generate", "--method", "reason_cache+gate", "--max-new-tokens", "9", "--trace", str(page))
    assert page_of(page)["name"] == "gate"


def test_an_answer_of_one_token_has_no_page_and_says_so(saved, tmp_path):
    """As the prompt leaves room for one only."""
    tokenizer, short = AutoTokenizer.from_pretrained(saved), shutil.copytree(saved, tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 40}))
    word = next(word for word in tokenizer.get_vocab() if word.startswith("a"))
    problem = Problem("prompt", "", messages=({"role": "user", "content": word},))
    around = len(encode(tokenizer, prompt_text(tokenizer, problem))) - 1
    page = tmp_path / "read.html"
    command = ["generate", "--model", str(short), "--method", "quest:block_size=8", "--budget", "32"]
    command += ["--prompt", " ".join([word] * (39 - around)), "--trace", str(page), "--max-new-tokens", "9"]
    done = run_seergate(*command)
    assert done.returncode == 0, done.stderr
    assert f"no page was written to {page}: the only token comes from the prompt" in done.stderr and not page.exists()
