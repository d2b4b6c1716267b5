"""The record, the unit of all data: a sentence or a pair of sentences. A shard is a tar of records.

In a tar, a record is a line of JSON, or the consecutive members that share a key. WebDataset calls such members a
sample, and so does this file. (Elsewhere in xscale, a sample is what a stream trains on in a step.)
"""

import io
import json
import re
import tarfile
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from xscale.errors import can_be_encoded_as_utf8

_BOM = "\ufeff"
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
        """Return the record as one line of JSON."""
        fields: dict = {"key": self.key, "langs": list(self.langs), "texts": list(self.texts)}
        if self.links is not None:
            fields["links"] = self.links
        if self.doc is not None:
            fields["doc"] = self.doc
        return _encode(fields)

    @classmethod
    def from_dict(cls, fields: dict) -> "Record":
        """Return the record with these fields. Raises ValueError if a field is absent or empty, or has a wrong type."""
        try:
            key = fields["key"]
            langs = tuple(fields["langs"])
            texts = tuple(fields["texts"])
        except (KeyError, TypeError):
            raise ValueError(
                f"{fields!r:.60} is not a record. A record needs the field `key`, and the fields `langs` and `texts`, "
                "which must be lists"
            ) from None
        if isinstance(fields["langs"], str) or isinstance(fields["texts"], str) or not isinstance(key, str | int):
            raise ValueError(
                f"record {key!r}: `langs` and `texts` must be lists of strings, and `key` must be a string"
            )
        if len(langs) != len(texts) or len(texts) not in (1, 2):
            raise ValueError(
                f"record {key!r}: the number of langs is {len(langs)}, and that of texts {len(texts)}. Write 1 lang "
                "and 1 text, or 2 langs and 2 texts"
            )
        for text in (*langs, *texts):
            if not isinstance(text, str) or not text or text.isspace():
                raise ValueError(
                    f"record {key!r} has {text!r:.60} in `langs` or `texts`. Each item of both lists must be a string "
                    "that is not blank"
                )
        links = fields.get("links")
        doc = fields.get("doc")
        if not isinstance(links, str | None) or not isinstance(doc, str | int | None):
            raise ValueError(
                f"record {key!r} has `links` {links!r} and `doc` {doc!r}. `links` must be a string, such as '0-0 1-2', "
                "or absent. `doc` must be a string or a whole number, or absent"
            )
        if isinstance(key, str) and not key.isascii() and not can_be_encoded_as_utf8(key):
            raise ValueError(f"record {key!r}: the key has an unpaired surrogate, which UTF-8 cannot encode")
        return cls(str(key), langs, texts, links, doc)


class Shard(NamedTuple):
    """A tar of records, as index.json lists it."""

    name: Annotated[str, Field(pattern=r"^[^/\p{C}]+\.tar$")]
    records: Annotated[int, Field(gt=0)]
    bytes: Annotated[int, Field(ge=0)]
    sha256: str
    idx_crc32: int


def parse_json(data: bytes, refuse_repeated_fields: bool = True) -> Any:
    """Return the value of a JSON text. refuse_repeated_fields: refuse a field that occurs twice, which takes more
    time. Raises ValueError."""
    try:
        return (_decode_once if refuse_repeated_fields else json.loads)(data.decode().removeprefix(_BOM))
    except UnicodeDecodeError as error:
        raise ValueError(f"the text is not UTF-8 ({error})") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"the text is not JSON ({error})") from None


def _refuse_repeated_fields(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(fields)) < len(fields):
        names = Counter(name for name, _ in fields)
        raise ValueError(f"a field of the JSON object occurs twice: {names.most_common(1)[0][0]}")
    return dict(fields)


_META = re.compile(r"__[^/]*__($|/)")
"""Matches the names of WebDataset's own members, such as __meta__."""
_decode_once = json.JSONDecoder(object_pairs_hook=_refuse_repeated_fields).decode


def parse_tar_sample(data: bytes, langs: tuple[str, ...] | None, refuse_other_langs: bool = False) -> Record:
    """Return the record of consecutive tar members: of KEY.json, of KEY.LANG.txt for each language with or without
    KEY.links.txt, or of KEY.txt.

    data: the bytes of the members. langs: the languages whose texts are read, in this order; None: all.
    refuse_other_langs: refuse texts in other languages. Raises ValueError.
    """
    key = ""
    members = dict[str, bytes]()
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        for member in tar:
            if member.issparse() or not (member.isreg() or member.isdir()):  # a sparse file may have any size
                raise ValueError(
                    f"the tar member {member.name} is a link, a device or a sparse file. Archive a plain file instead"
                )
            content = tar.extractfile(member)
            if content is None or not is_sample_member(member.name):
                continue
            key = sample_key(member.name)
            extension = member.name[len(key) + 1 :]
            kind = extension.rpartition(".")[2]
            if kind != kind.lower() and kind.lower() in ("json", "txt"):
                raise ValueError(f"the tar member {member.name} must have its extension in lower case, .{kind.lower()}")
            if extension in members:
                raise ValueError(
                    f"two tar members of one sample have the name {member.name}. Use different keys for different "
                    "samples"
                )
            members[extension] = content.read()
    return record_from_members(key, members, langs, refuse_other_langs)


def record_from_members(
    key: str, content_by_extension: Mapping[str, bytes], langs: tuple[str, ...] | None, refuse_other_langs: bool = False
) -> Record:
    """Return the record of a sample's JSON member or, without one, of its text members. content_by_extension:
    the content of each member, by the part of its name after the key. langs, refuse_other_langs: see parse_tar_sample.
    Raises ValueError."""
    if "json" in content_by_extension:
        fields = parse_json(content_by_extension["json"])
        if not isinstance(fields, dict):
            raise ValueError(f"the content of {key}.json is not a JSON object")
        return Record.from_dict({"key": key} | fields)
    texts = dict[str, str]()
    for extension in content_by_extension:
        lang = extension.removesuffix(".txt")
        if extension == "txt" and langs and len(langs) == 1:
            lang = langs[0]
        elif lang == extension or "." in lang or lang == "links":
            continue
        texts[lang] = content_by_extension[extension].decode().removeprefix(_BOM).rstrip("\r\n")
    if not texts:
        raise ValueError(
            f"sample {key!r} has no text. A sample needs a tar member KEY.json, KEY.txt, or KEY.LANG.txt for each "
            "language. For KEY.txt, set the language by `xscale data index --langs LANG` or by `mono: LANG` in "
            "corpus.yaml"
        )
    links = content_by_extension["links.txt"].decode().strip() if "links.txt" in content_by_extension else None
    order = [lang for lang in langs or texts if lang in texts]
    if refuse_other_langs and len(order) < len(texts):
        raise ValueError(
            f"sample {key!r} has texts in {', '.join(texts)}, but earlier samples have texts in "
            f"{', '.join(langs or ())}. Pass the languages of the records to --langs, or use one folder per language "
            "or language pair"
        )
    return Record.from_dict({"key": key, "langs": order, "texts": [texts[lang] for lang in order], "links": links})


def is_sample_member(name: str) -> bool:
    """Return True if a tar member belongs to a sample. As in WebDataset, names without an extension (README), names
    that begin with a dot (macOS's ._NAME and .DS_Store), and __NAME__ do not."""
    base = name.rpartition("/")[2]
    return "." in base[1:] and not base.startswith(".") and not _META.match(name)


def sample_key(name: str) -> str:
    """Return the key of a tar member, by WebDataset's rule: the path up to the first dot of the file's name."""
    directory, slash, base = name.rpartition("/")
    return directory + slash + base.partition(".")[0]
