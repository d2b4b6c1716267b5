"""The record, the unit of all data: a sentence or a pair of sentences."""

import json
from typing import NamedTuple

from xscale.errors import can_be_encoded

_encode = json.JSONEncoder(ensure_ascii=False).encode


class Record(NamedTuple):
    """One sentence (`langs` and `texts` of length 1) or one sentence pair (length 2)."""

    key: str
    langs: tuple[str, ...]
    texts: tuple[str, ...]
    links: str | None = None
    """Word links of a pair as "0-0 1-2" (Pharaoh form): 0-based words (data/words.py) of the first and second text."""
    doc: str | int | None = None
    """The name of a sentence's document. Consecutive records of a shard with the same document are running text."""

    def to_json(self) -> str:
        fields: dict = {"key": self.key, "langs": list(self.langs), "texts": list(self.texts)}
        if self.links is not None:
            fields["links"] = self.links
        if self.doc is not None:
            fields["doc"] = self.doc
        return _encode(fields)

    @classmethod
    def from_dict(cls, fields: dict) -> "Record":
        """Return the record with these fields. Raises ValueError if a field is absent, of the wrong type or empty."""
        try:
            key, langs, texts = fields["key"], tuple(fields["langs"]), tuple(fields["texts"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a record: needs key, langs and texts ({error})") from None
        if isinstance(fields["langs"], str) or isinstance(fields["texts"], str) or not isinstance(key, str | int):
            raise ValueError(f"record {key!r}: langs and texts are lists of strings, and key is a string")
        if not all(isinstance(lang, str) for lang in langs):
            raise ValueError(f"record {key!r}: langs {list(langs)} are not strings, which names of languages must be")
        if len(langs) != len(texts) or len(texts) not in (1, 2):
            raise ValueError(f"record {key!r}: {len(langs)} langs and {len(texts)} texts; needs 1 or 2 of each")
        for text in texts:
            if not isinstance(text, str) or not text or text.isspace():
                raise ValueError(f"record {key!r}: a text is empty or not a string")
        links = fields.get("links")
        if links is not None and not isinstance(links, str):
            raise ValueError(f"record {key!r}: links {links!r} are not a string such as '0-0 1-2'")
        if isinstance(key, str) and not key.isascii() and not can_be_encoded(key):
            raise ValueError(f"record {key!r}: its key has an unpaired surrogate, which UTF-8 cannot encode")
        doc = fields.get("doc")
        if doc is not None and not isinstance(doc, str | int):
            raise ValueError(f"record {key!r}: doc {doc!r} is neither a string nor a whole number")
        return cls(str(key), langs, texts, links, doc)
