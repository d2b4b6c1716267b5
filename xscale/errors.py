"""What a user can cause, told to the user."""


class UserError(ValueError):
    """Names the file, the value and the remedy; ends the program with exit code 2 and no traceback."""


class NotFinite(Exception):
    """A run whose loss or gradients are no numbers any more; all ranks raise it together. Exit code 3."""

    def __init__(self, message: str, step: int = 0, good: int | None = None):
        """step: whose update a run that goes back leaves out, 1 for the first. good: step of the newest checkpoint from
        before any of it."""
        super().__init__(message)
        self.step, self.good = step, good


class RankError(UserError):
    """A UserError that this rank alone has seen, such as a damaged record of its share."""
