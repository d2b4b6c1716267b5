"""YAML that is read strictly, for recipes and corpora."""

import re
from typing import Any

import yaml

MOST_ALIASES = 10
"""The maximum number of aliases in a YAML text. Aliases of aliases can make gigabytes of a few lines."""


def read_yaml(text: str) -> Any:
    """Return the content of a YAML text. Raises ValueError."""
    try:
        return yaml.load(text, StrictLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from None


class StrictLoader(yaml.SafeLoader):
    """A loader of YAML 1.2's numbers and truth values: 3e-4 is a number, and only true and false are truth values, so
    that `no` is Norwegian. Keys are text, also those that YAML reads as numbers or dates. It refuses a key that occurs
    twice; YAML itself would use the last value."""

    aliases = 0
    """The number of aliases so far."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            self.aliases += 1
            if self.aliases > MOST_ALIASES:
                raise yaml.YAMLError(
                    f"the file has more than {MOST_ALIASES} aliases (`*name`). Replace aliases by their values"
                )
        return super().compose_node(parent, index)  # type: ignore[no-untyped-call]

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = dict[Any, Any]()
        for key_node, value_node in node.value:
            key = str(self.construct_object(key_node, deep=True))  # type: ignore[no-untyped-call]
            if key in mapping:
                raise yaml.constructor.ConstructorError(None, None, f"the key `{key}` occurs twice", node.start_mark)
            mapping[key] = self.construct_object(value_node, deep=deep)  # type: ignore[no-untyped-call]
        return mapping


NUMBER = re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)[eE][-+]?\d+$")
StrictLoader.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, list("-+.0123456789"))
for first in "yYnNoO":  # of yes, no, on and off
    resolvers = StrictLoader.yaml_implicit_resolvers[first]
    StrictLoader.yaml_implicit_resolvers[first] = [r for r in resolvers if r[0] != "tag:yaml.org,2002:bool"]
