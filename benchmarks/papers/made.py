"""Makes the data of the scale `smoke`: sentences of the demo world, in files with the names that --data has."""

import lzma
from pathlib import Path

from data_tools.demo_world import World
from xscale.data.words import split

PAIRS, TAGGED = 500, 150
_TAGS = {"the": "DET", "a": "DET", "an": "DET", ".": "PUNCT", ",": "PUNCT", "?": "PUNCT", "!": "PUNCT"}


def make_data(folder: Path) -> Path:
    if (folder / "done").exists():
        return folder
    world = World(0)
    pairs = [spaced(*world.pair(number)) for number in range(PAIRS)]
    english = [pair[0] for pair in pairs]
    write(folder / "parallel/bible/bible.en.xz", english)
    dictionary = [f"{a}\t{b}" for a, b in world.dictionary()]
    for stem, other in (
        ("parallel/tatoeba/en-de", "de"),
        ("parallel/tatoeba/en-zh", "zh"),
        ("parallel/multi30k/train", "de"),
    ):
        write(folder / f"{stem}.en.xz", english)
        write(folder / f"{stem}.{other}.xz", [pair[1] for pair in pairs])
        write(folder / f"{stem}.links.xz", [pair[2] for pair in pairs])
        write(folder / f"lexicon/muse/en-{other}.txt.xz", dictionary)
        write(folder / f"mono/wiki_{other}/aa.xz", [pair[1] for pair in pairs])
    write(folder / "mono/wiki_en/aa.xz", english)
    tests = [spaced(*world.pair(PAIRS + number)) for number in range(60)]
    for first, second in (("eval/tatoeba/tatoeba.deu-eng.eng", "eval/tatoeba/tatoeba.deu-eng.deu"),
                          ("eval/tatoeba/tatoeba.cmn-eng.eng", "eval/tatoeba/tatoeba.cmn-eng.cmn"),
                          ("parallel/multi30k/val.en", "parallel/multi30k/val.de")):  # fmt: skip
        write(folder / f"{first}.xz", [pair[0] for pair in tests])
        write(folder / f"{second}.xz", [pair[1] for pair in tests])
    for name, side in (("en_ewt-ud-train", 0), ("en_ewt-ud-test", 0), ("de_pud-ud-test", 1), ("zh_pud-ud-test", 1)):
        write(folder / f"eval/pos/{name}.conllu.xz", [tagged(pair[side]) for pair in pairs])
    for part in ("train", "dev"):
        for lang, side in (("en", 0), ("de", 1), ("zh", 1)):
            write(folder / f"eval/ner/{part}-{lang}.tsv.xz", [named(pair[side]) for pair in pairs[:TAGGED]])
    (folder / "done").touch()
    return folder


def spaced(first: str, second: str, links: str) -> tuple[str, str, str]:
    """A pair with spaces between all words that its links count."""
    a, b = (" ".join(words) for words, _ in split([first, second]))
    return a, b, links


def tagged(text: str) -> str:
    """A sentence as CoNLL-U. Its tags are made up from the words' form; each word's head is the word before it."""
    words = text.split()
    rows = [
        f"{n + 1}\t{word}\t_\t{tag(word)}\t_\t_\t{n}\t{'obj' if n else 'root'}\t_\t_" for n, word in enumerate(words)
    ]
    return "\n".join([f"# text = {text}", *rows, ""])


def tag(word: str) -> str:
    by_look = "PROPN" if word.istitle() else "VERB" if len(word) % 3 == 0 else "NOUN"
    return _TAGS.get(word.lower(), by_look)


def named(text: str) -> str:
    return "".join(f"{word}\t{'B-PER' if word.istitle() else 'O'}\n" for word in text.split())


def write(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress("".join(line + "\n" for line in lines).encode()))
