"""Generate the demo corpus: raw files in one natural and two invented languages, and shards of them.

    xscale data demo_corpus [--out data/demo] [--pairs 20000] [--mono 20000] [--seed 0]

The languages are English (en) and two invented languages (xx, yy). The folder raw/ has a TSV of en-xx pairs with word
alignments, a TMX of en-yy pairs, documents of each language in the format of WikiExtractor, and en-xx and xx-en
dictionaries. There are a fifth as many en-yy pairs as en-xx pairs, and a fifth as many yy sentences as xx sentences.
corpus.yaml names the files in raw/. From these files, `xscale data prepare` makes pairs/, pairs_yy/, mono_en/,
mono_xx/, mono_yy/, heldout/pairs/, heldout_yy/pairs/, tokenizer/, lexicon/{en-xx,xx-en}.txt, report.html and
report.json.
"""

import argparse
import io
import json
from contextlib import redirect_stdout
from pathlib import Path

from xscale import files
from xscale.data.link_projection import Link, format_pharaoh, parse_pharaoh
from xscale.data.words import split_words_and_symbols

from . import prepare
from .command import check_new_folder, run_tool_and_exit
from .demo_world import FIRST_YY, WRITTEN, World
from .steps import write_lines

HELDOUT = 1000
CORPUS = """\
# This file tells `xscale data prepare` how to read the files in raw/. docs/reference/corpus.md describes every key.
sources:
  # Columns 1 and 2 are the two texts. Column 3 has word alignments, which the objectives alignlm and contextual need.
  - {name: pairs, pairs: [en, xx], tsv: "RAW/en-xx.tsv", columns: [1, 2], links: 3}
  - {name: pairs_yy, pairs: [en, yy], tmx: "RAW/en-yy.tmx"}
  # These folders have documents in the format of the tool WikiExtractor. prepare splits documents into sentences.
  - {name: mono_en, mono: en, text: "RAW/wiki_en"}
  - {name: mono_xx, mono: xx, text: "RAW/wiki_xx"}
  - {name: mono_yy, mono: yy, text: "RAW/wiki_yy"}
rules:
  length: {characters: [1, 500]}  # the minimum and the maximum number of characters of a sentence
  ratio: 9                        # one side of a pair is at most 9 times as long as the other
  dedup: exact                    # keeps only the first of several equal pairs or documents
tokenizer: {type: wordpiece, vocab_size: 2581}  # the text has too few different words for more tokens
heldout: {pairs: HELDOUT}  # for evaluation: HELDOUT en-xx pairs and HELDOUT en-yy pairs, but at most a tenth of all
lexicons: ["RAW/en-xx.txt", "RAW/xx-en.txt"]
"""
TMX = """\
<?xml version="1.0" encoding="UTF-8"?>
<tmx version="1.4">
<header srclang="en" datatype="plaintext" segtype="sentence" adminlang="en" o-tmf="none" creationtool="demo"/>
<body>
%s</body>
</tmx>
"""
UNIT = '<tu><tuv xml:lang="en"><seg>{}</seg></tuv><tuv xml:lang="yy"><seg>{}</seg></tuv></tu>\n'


def write_raw_files_and_shards(out: Path, pairs: int = 20_000, mono: int = 20_000, seed: int = 0) -> None:
    """Write the whole corpus to the directory `out`, which appears only when it is complete. pairs, mono: numbers of
    en-xx pairs, and of sentences of en and of xx. Raises UserError."""
    check_new_folder(out)
    with files.atomic_write(out) as partial:
        raw = partial / "raw"
        corpus = partial / "corpus.yaml"
        made = partial / "made"
        raw.mkdir(parents=True)
        write_raw(World(seed), raw, pairs, mono)
        write_corpus_yaml(corpus, raw)
        with redirect_stdout(io.StringIO()):  # the report names folders that are moved afterwards
            prepare.main([str(corpus), "--out", str(made), "--workers", "1"])
        for name, pair in (("heldout", "en-xx"), ("heldout_yy", "en-yy")):
            if (made / "heldout" / pair).exists():  # of a few pairs, none is held out
                (partial / name).mkdir()
                (made / "heldout" / pair).rename(partial / name / "pairs")
        files.remove(made / "heldout")
        for path in [*(made / "shards").iterdir(), *made.iterdir()]:
            path.rename(partial / path.name)
        (partial / "shards").rmdir()
        made.rmdir()
        write_corpus_yaml(corpus, out / "raw")


def write_corpus_yaml(path: Path, raw: Path) -> None:
    """Write the corpus.yaml for the raw files in the folder `raw`."""
    folder = json.dumps(str(raw), ensure_ascii=False)[1:-1]
    files.write_text(path, CORPUS.replace("RAW", folder).replace("HELDOUT", str(HELDOUT)))


def write_raw(world: World, raw: Path, pairs: int, mono: int) -> None:
    """Write the raw files of the three languages to the folder `raw`. pairs, mono: see write_raw_files_and_shards."""
    lines = list[str]()
    for number in range(count_with_heldout(pairs)):
        en, xx, links = world.pair(number)
        lines.append(f"{en}\t{xx}\t{renumber_links_by_whitespace(en, xx, links)}")
    write_lines(raw / "en-xx.tsv", lines)
    fifth = -(-pairs // 5)
    units = ""
    for number in range(FIRST_YY, FIRST_YY + count_with_heldout(fifth)):
        en, yy, _ = world.pair(number, "yy")
        units += UNIT.format(en, yy)
    files.write_text(raw / "en-yy.tmx", TMX % units)
    for language in WRITTEN:
        wanted = -(-mono // 5) if language == "yy" else mono
        write_wiki(world, raw / f"wiki_{language}" / "AA", language, wanted)
    entries = world.dictionary()
    write_lines(raw / "en-xx.txt", sorted(f"{en} {xx}" for en, xx in entries))
    write_lines(raw / "xx-en.txt", sorted(f"{xx} {en}" for en, xx in entries))


def count_with_heldout(pairs: int) -> int:
    """Return the number of pairs to generate, so that `pairs` of them remain for training after some are held out."""
    return pairs + min(HELDOUT, pairs // 9)


def renumber_links_by_whitespace(en: str, xx: str, links: str) -> str:
    """Return the links of a pair with the numbers of the words between white space, as in a TSV. Links of symbols,
    which end such words, are left out. links: the links with the numbers of the words and symbols of data/words.py."""
    (_, en_is_word), (_, xx_is_word) = split_words_and_symbols([en, xx])
    kept = list[Link]()
    for i, j in parse_pharaoh(links, (len(en_is_word), len(xx_is_word))):
        if en_is_word[i]:
            kept.append((int(en_is_word[:i].sum()), int(xx_is_word[:j].sum())))
    return format_pharaoh(kept)


def write_wiki(world: World, folder: Path, language: str, sentence_count: int) -> None:
    """Write documents with `sentence_count` sentences in total to the folder, in the format of WikiExtractor."""
    space = "" if language == "yy" else " "
    lines = list[str]()
    written = 0
    number = 0
    while written < sentence_count:
        number += 1
        sentences = world.document(language, number)[: sentence_count - written]
        title = f'<doc id="{number}" url="" title="{language} {number}">'
        lines += [title, space.join(sentences), "", "</doc>", ""]
        written += len(sentences)
    write_lines(folder / "wiki_00", lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="xscale data demo_corpus", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("data/demo"), help="new folder for the corpus (default: data/demo)"
    )
    parser.add_argument("--pairs", type=int, default=20_000, help="number of en-xx sentence pairs (default: 20,000)")
    parser.add_argument(
        "--mono",
        type=int,
        default=20_000,
        help="number of monolingual sentences in each of en and xx; yy has a fifth as many (default: 20,000)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random text (default: 0)")
    args = parser.parse_args(argv)
    write_raw_files_and_shards(args.out, args.pairs, args.mono, args.seed)
    print(
        f"{args.out} has a tokenizer, dictionaries, and text in English (en) and two invented languages (xx, yy): "
        f"about {args.pairs:,} en-xx pairs, {args.mono:,} en sentences and {args.mono:,} xx sentences, and a fifth as "
        "many en-yy pairs and yy sentences"
    )


if __name__ == "__main__":
    run_tool_and_exit(main)
