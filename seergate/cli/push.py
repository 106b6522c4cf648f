"""``seergate push``."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from seergate.cli.adapters import add_card_options, describe
from seergate.errors import SeergateError

HELP = (
    "upload gates to the Hugging Face Hub",
    "Upload gates in one commit, with a model card that says what they are for, how to use them, how they were made\n"
    "and how good they are. What you wrote around the generated part of an existing card stays.",
    [
        "seergate push runs/qwen3-8b-gates org/Qwen3-8B-gates --dry-run",
        "seergate push runs/qwen3-8b-gates org/Qwen3-8B-gates --private",
        "seergate push runs/qwen3-8b-gates org/Qwen3-8B-gates --results runs/eval-Qwen3-8B-aime24",
        "seergate push runs/qwen3-8b-gates org/Qwen3-8B-gates --create-pr --message 'Gates after 800 steps'",
    ],
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("directory", metavar="DIR", help="directory of gates")
    parser.add_argument("repo_id", metavar="ORG/NAME", help="repository, made if need be; NAME alone is your own")
    parser.add_argument("--private", action="store_true", default=None, help="make a new repository private")
    parser.add_argument("--revision", metavar="BRANCH", help="commit to this branch; made if need be [main]")
    parser.add_argument("--subfolder", metavar="DIR", help="where in the repository [its root]")
    parser.add_argument("--message", default="Upload attention gates", help="of the commit [%(default)s]")
    parser.add_argument("--description", help="of the commit or pull request")
    parser.add_argument("--create-pr", action="store_true", help="open a pull request instead of committing")
    parser.add_argument("--dry-run", action="store_true", help="print the card and what would be uploaded, and stop")
    parser.add_argument("--token", metavar="TOKEN", help="for the Hub [the one of `hf auth login`]")
    add_card_options(parser)


def run(options: argparse.Namespace) -> int:
    """Read the gates, describe them, upload them."""
    from seergate.gates import CARD_FILE, Source, base_note, check_repo_id, read_card, save_adapter
    from seergate.hf.bank import GateBank

    directory = Path(options.directory)
    if not directory.is_dir():
        raise SeergateError(f"{directory} is not a directory; push uploads a directory of gates")
    bank = GateBank.from_pretrained(directory)
    describe(bank, options)
    if options.dry_run:
        check_repo_id(options.repo_id)
        with tempfile.TemporaryDirectory() as place:
            if card := read_card(directory):
                (Path(place) / CARD_FILE).write_text(card, encoding="utf-8")
            source = Source(options.repo_id, options.revision, options.subfolder)
            files = sorted(save_adapter(bank, place, card_source=source).iterdir())
            print((Path(place) / CARD_FILE).read_text(encoding="utf-8"))
            print(f"not uploaded: {', '.join(f'{file.name} ({file.stat().st_size:,} bytes)' for file in files)}")
        return 0
    if note := base_note(bank.geometry.base_model):
        print(note)
    address = bank.push_to_hub(
        options.repo_id,
        card=read_card(directory),
        private=options.private,
        token=options.token,
        revision=options.revision,
        subfolder=options.subfolder,
        commit_message=options.message,
        commit_description=options.description,
        create_pr=options.create_pr,
    )
    print(f"pushed: {address}")
    return 0
