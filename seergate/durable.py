"""Atomic, fsynced writes, and locks of files that one process at a time writes."""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from seergate.errors import SeergateError, sentence

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; the file there replaces ``path`` atomically when the block succeeds."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with naming(path):
            yield draft
            flush(draft)
            os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an `OSError` of the system in the ``with`` block that names no file, such as that of a full disk, this
    file's name.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def save_file(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Like `safetensors.torch.save_file`, with the permissions of any new file; that lets only the owner read it."""
    from safetensors.torch import save

    with naming(path):
        path.write_bytes(save(dict(tensors), metadata))


def lock(file: IO[Any], path: Path, advice: str) -> None:
    """Lock ``path``, which is an open file or a directory with it, for this process until the file is closed.

    Systems and file systems without `flock` do not lock; there, two writers are the user's to avoid. A forked child
    closes the file, so that one that outlives a killed process does not hold the lock.

    Raises:
        SeergateError: if another process holds the lock; ``advice`` ends the message.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise SeergateError(f"another process is writing to {path}; {advice}") from error
    except OSError:
        return
    file_ref = weakref.ref(file)
    os.register_at_fork(after_in_child=lambda: (open_file := file_ref()) and open_file.close())


def flush(path: Path) -> None:
    """Wait until a file's contents, or a directory's entries, are on the disk.

    Raises:
        OSError: if ``path`` does not exist or is not writable.
    """
    if not path.is_dir():
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    elif os.name == "posix":  # other systems do not open directories
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):  # not supported for directories
                raise
        finally:
            os.close(handle)


def check_writable(out: Path) -> None:
    """Create an output directory, or refuse it before long work if it cannot be written to."""
    if out.exists() and not out.is_dir():
        raise SeergateError(f"{out} is a file; the output needs a directory")
    if out.parts[:1] == ("~",):  # shells expand it at the beginning of a word only, YAML does not
        raise SeergateError(f"the output {out} would be in a directory named ~; write {out.expanduser()}")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SeergateError(f"the output {out} cannot be made: {sentence(error)}") from error
    if not os.access(out, os.W_OK):
        raise SeergateError(f"{out} cannot be written to")
