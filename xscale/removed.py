"""Flags and recipe fields that xscale 0.1 had, and what to use instead. An error names the substitute. Goes with 0.3."""

FLAGS: dict[str, str] = {
    # keep
}
"""By flag, such as "--data_change"."""

FIELDS: dict[str, str] = {
    # keep
}
"""By recipe field, with * for a name that users choose: "checkpoint.hook", "streams.*.tokens"."""

COMMANDS: dict[str, str] = {
    # keep
}
"""By module: "xscale.doctor"."""
