"""Parses records from the bytes of a tar. A record is a line of JSON, or the consecutive members that share a key."""

import io
import json
import tarfile
from typing import Any

from xscale.record import Record

_BOM = "\ufeff"


def parse_line(line: bytes, unique_fields: bool = False) -> Record:
    """The record of a line of JSON. unique_fields: refuse a field that occurs twice; the check takes time."""
    return Record.from_dict(parse_json(line, unique_fields))


def parse_json(data: bytes, unique_fields: bool = True) -> Any:
    try:
        return (_decode_once if unique_fields else json.loads)(data.decode().removeprefix(_BOM))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error})") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None


def _once(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(fields)
    if len(found) < len(fields):
        raise ValueError(f"a field occurs twice among {', '.join(name for name, _ in fields)}")
    return found


_decode_once = json.JSONDecoder(object_pairs_hook=_once).decode


def parse_sample(data: bytes, langs: tuple[str, ...] | None, whole: bool = False) -> Record:
    """The record of consecutive tar members: KEY.json, or KEY.LANG.txt for each language (+ KEY.links.txt), or KEY.txt.

    langs: the languages whose texts are read, in this order (None: all); whole: refuse texts in other languages.
    """
    texts: dict[str, str] = {}
    links, key, seen, fields = None, "", set[str](), None
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        for member in tar:
            content = tar.extractfile(member)
            if content is None:
                continue
            key = sample_key(member.name)
            extension = member.name[len(key) + 1 :]
            kind = extension.rpartition(".")[2]
            if kind != kind.lower() and kind.lower() in ("json", "txt"):
                raise ValueError(f"member {member.name}: write its extension in lower case, .{kind.lower()}")
            if extension in seen:
                raise ValueError(f"{member.name} occurs twice in one sample; give each sample a key of its own")
            seen.add(extension)
            text = content.read()
            if extension == "json":
                fields = parse_json(text)
                if not isinstance(fields, dict):
                    raise ValueError(f"{member.name} is not a JSON object")
            elif extension == "links.txt":
                links = text.decode().strip()
            elif extension == "txt" and langs and len(langs) == 1:
                texts[langs[0]] = text.decode().removeprefix(_BOM).rstrip("\n")
            elif extension.endswith(".txt") and extension.count(".") == 1:
                texts[extension.removesuffix(".txt")] = text.decode().removeprefix(_BOM).rstrip("\n")
    if fields is not None:
        return Record.from_dict({"key": key} | fields)
    if not texts:
        raise ValueError(f"sample {key!r}: needs KEY.json, KEY.LANG.txt members, or KEY.txt with --lang")
    order = [lang for lang in langs if lang in texts] if langs else list(texts)
    if whole and len(order) < len(texts):
        raise ValueError(
            f"sample {key!r} has texts in {', '.join(texts)}, the samples before in {', '.join(order) or 'others'}: "
            f"say which to read by --langs, or keep one directory for each language or pair"
        )
    return Record.from_dict({"key": key, "langs": order, "texts": [texts[lang] for lang in order], "links": links})


def sample_key(name: str) -> str:
    """The key of a tar member, by WebDataset's rule: the path up to the first dot of the file's name."""
    directory, slash, base = name.rpartition("/")
    return directory + slash + base.partition(".")[0]
