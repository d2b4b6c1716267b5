"""YAML that is read strictly, for recipes and corpora."""

import json
import re
from typing import Any

import yaml

MOST_ALIASES = 10
"""The maximum number of aliases in a YAML text. Aliases of aliases can make gigabytes of a few lines."""

MOST_DIGITS = 300
"""The maximum number of digits of a whole number. Longer numbers are too large for a float."""


def parse_yaml(text: str) -> Any:
    """Return the content of a YAML text, which JSON could also represent. Raises ValueError."""
    try:
        content = yaml.load(text, StrictLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from None
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text has an unpaired surrogate ({error.object[error.start]!r})") from None
    return content


class StrictLoader(yaml.SafeLoader):
    """A loader of YAML 1.2's numbers and truth values: 3e-4 is a number, 0100 is the number 100, 11:30:00 is text, and
    only true and false are truth values, so that `no` is Norwegian. Dates are text, and so are all keys. It refuses a
    key that occurs twice, of which YAML itself would use the last value, and tags, such as !!binary."""

    aliases = 0
    """The number of aliases so far."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            self.aliases += 1
            if self.aliases > MOST_ALIASES:
                raise yaml.YAMLError(
                    f"the file has more than {MOST_ALIASES} aliases (`*name`). Replace aliases by their values"
                )
        tag = getattr(self.peek_event(), "tag", None)  # type: ignore[no-untyped-call]
        if tag not in (None, "!", TEXT_TAG):
            name = tag.replace("tag:yaml.org,2002:", "!!")
            raise yaml.YAMLError(f"the tag {name} is not supported. Remove the tag, or put text into quotation marks")
        return super().compose_node(parent, index)  # type: ignore[no-untyped-call]

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = dict[Any, Any]()
        for key_node, value_node in node.value:
            key = str(self.construct_object(key_node, deep=True))  # type: ignore[no-untyped-call]
            if key in mapping:
                raise yaml.constructor.ConstructorError(None, None, f"the key `{key}` occurs twice", node.start_mark)
            mapping[key] = self.construct_object(value_node, deep=deep)  # type: ignore[no-untyped-call]
        return mapping

    def construct_int_of_limited_length(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > MOST_DIGITS:
            raise yaml.YAMLError(
                f"the number {node.value[:20]}... has {len(node.value):,} digits. Write at most {MOST_DIGITS} digits, "
                "or put text into quotation marks"
            )
        return int(node.value, 0 if node.value[:2] in ("0o", "0x") else 10)


TEXT_TAG = "tag:yaml.org,2002:str"
INT_TAG = "tag:yaml.org,2002:int"
FLOAT_TAG = "tag:yaml.org,2002:float"
INT = re.compile(r"[-+]?[0-9]+$|0o[0-7]+$|0x[0-9a-fA-F]+$")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$")
FIRST_OF_NUMBERS = list("-+.0123456789")
StrictLoader.yaml_implicit_resolvers = {}
for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items():
    removed = {INT_TAG, FLOAT_TAG, "tag:yaml.org,2002:timestamp"}
    if first in "yYnNoO":  # of yes, no, on and off
        removed.add("tag:yaml.org,2002:bool")
    StrictLoader.yaml_implicit_resolvers[first] = [r for r in resolvers if r[0] not in removed]
StrictLoader.add_implicit_resolver(INT_TAG, INT, FIRST_OF_NUMBERS)
StrictLoader.add_implicit_resolver(FLOAT_TAG, FLOAT, FIRST_OF_NUMBERS)
StrictLoader.add_constructor(INT_TAG, StrictLoader.construct_int_of_limited_length)
