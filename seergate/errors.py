"""The one error type for a user's mistake that is not about an argument's value, and how it quotes other errors."""


class SeergateError(ValueError):
    """Something the user can mend: a missing file, a model of an unsupported family, gates for another model.

    The message is one sentence that names what was wrong and what would be right. The command line prints it without a
    traceback and exits with 2, as it does for every `ValueError`.
    """


def how_to_install(extra: str) -> str:
    """The command that adds an optional part of seergate, for the messages about libraries that are missing.

    Args:
        extra: a key of ``optional-dependencies`` in `pyproject.toml`.
    """
    return f'run: pip install "seergate[{extra}]"'


def first_line(error: BaseException) -> str:
    """What another error says, in one line: its first, or the name of its type if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def sentence(error: BaseException) -> str:
    """An error in one line for the command line; the system's own about a file name it and say what is wrong."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename} cannot be used: {error.strerror[0].lower()}{error.strerror[1:]}"
    return " ".join(str(error).split())
