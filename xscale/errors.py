"""What a user can cause, told to the user."""


class UserError(ValueError):
    """Names the file, the value and the remedy; ends the program with exit code 2 and no traceback."""


class NotFinite(Exception):
    """A run whose loss or gradients are no numbers any more; all ranks raise it together. Exit code 3."""


class RankError(UserError):
    """A UserError that this rank alone has seen, such as a damaged record of its share."""
