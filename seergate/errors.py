"""The one error type for a user's mistake that is not about an argument's value."""


class SeergateError(ValueError):
    """Something the user can mend: a missing file, a model of an unsupported family, gates for another model.

    The message is one sentence that names what was wrong and what would be right. The command line prints it without a
    traceback and exits with 2, as it does for every `ValueError`.
    """
