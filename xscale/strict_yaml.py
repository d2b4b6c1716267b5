"""YAML that is read strictly, for recipes and corpora."""

from typing import Any

import yaml

MOST_VALUES = 100_000
"""The maximum number of values of a YAML text. Each use of an alias counts as a copy."""


def read_yaml(text: str) -> Any:
    """Return the content of a YAML text. Raises ValueError."""
    try:
        return yaml.load(text, UniqueKeys)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from None


class UniqueKeys(yaml.SafeLoader):
    """A YAML loader that refuses a key that occurs twice, also as 1 and "1". YAML itself would use the last value.
    Aliases of aliases, which make gigabytes of a few lines, are refused too."""

    def get_single_data(self) -> Any:
        root = self.get_single_node()
        if root is None:
            return None
        values = count_values(root, {})
        if values > MOST_VALUES:
            raise yaml.YAMLError(f"its aliases make {values:.2g} values of it; write out what they stand for")
        return self.construct_document(root)  # type: ignore[no-untyped-call]

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = set[str]()
        for key_node, _ in node.value:
            key = str(self.construct_object(key_node, deep=True))  # type: ignore[no-untyped-call]
            if key in keys:
                raise yaml.constructor.ConstructorError(None, None, f"{key} occurs twice", node.start_mark)
            keys.add(key)
        return super().construct_mapping(node, deep)


def count_values(node: yaml.Node, counts: dict[int, int]) -> int:
    """Return the number of values in a node, with aliases as copies. counts: the numbers of the nodes seen, by id."""
    if id(node) in counts:
        return counts[id(node)]
    counts[id(node)] = 1  # for a node that contains itself
    parts = list[yaml.Node]()
    if isinstance(node, yaml.SequenceNode):
        parts = node.value
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            parts += [key, value]
    counts[id(node)] = 1 + sum(count_values(part, counts) for part in parts)
    return counts[id(node)]
