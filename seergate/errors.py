"""The one error type for a user's mistake that is not about an argument's value, and how it quotes other errors."""


class SeergateError(ValueError):
    """Something the user can mend: a missing file, a model of an unsupported family, gates for another model.

    The message is one sentence that names what was wrong and what would be right. The command line prints it without a
    traceback and exits with 2, as it does for every `ValueError`.
    """


def first_line(error: BaseException) -> str:
    """What another error says, in one line: its first, or the name of its type if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
