"""What is suggested for a name that does not exist."""

import pytest

from seergate.errors import did_you_mean, sentence


@pytest.mark.parametrize(
    ("name", "known", "said"),
    [
        ("evaluate", ["ablate", "eval"], "did you mean 'eval'?"),
        ("budget", ["budget_min", "threshold", "token_budget"], "did you mean 'token_budget'?"),
        ("lr", ["min_lr", "learning_rate"], "did you mean 'learning_rate'?"),
        ("--lr", ["--min-lr", "--learning-rate"], "did you mean '--learning-rate'?"),
        ("Qest", ["dense", "quest"], "did you mean 'quest'?"),
        ("max", ["seed", "max_steps"], "did you mean 'max_steps'?"),
        ("zzz", ["dense", "quest"], "there are dense, quest"),
        ("zzz", [], "there are none"),
    ],
)
def test_the_known_name_that_is_most_like_it_or_all_of_them(name, known, said):
    assert did_you_mean(name, known) == said


def test_an_error_is_one_sentence_and_a_long_one_keeps_its_ends():
    assert sentence(PermissionError(13, "Permission denied", "/there")) == "/there cannot be used: permission denied"
    assert sentence(FileNotFoundError("no such\n  preset")) == "no such preset"
    message = sentence(ValueError(f"the option is {'x' * 600_000}; it must be short"))
    assert len(message) < 5000 and message.startswith("the option is xxx") and message.endswith("; it must be short")
