"""The operators that take most of a step's time. Each docstring states the operator's meaning in plain torch."""
