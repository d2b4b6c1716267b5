"""What `xscale.eval.run` can measure: a table of tasks, each of which plans its rows from the flags."""

import argparse
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from xscale.data.lexicon import cut_pair, find_lexicons, load_lexicon, pair_of
from xscale.data.shards import Source, pair_name
from xscale.errors import UserError
from xscale.eval import aer, alignment_score, heldout, induction, mining, mteb_tasks, perplexity, retrieval
from xscale.eval.model import Exported

Scores = dict[str, float]


class TaskRow(NamedTuple):
    name: str
    """A language, or a pair of languages, the same whichever way round."""
    path: Path
    """Where it lies; part of the name where several rows have the same."""
    measure: Callable[[Exported], Mapping[str, Scores]]
    """Scores by variant of the task; "" where there is one alone."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--data", type=Path, nargs="+", default=[], help="shard directories of held-out text; for alignment, of any")
    add(
        "--limit", type=int, default=1000, help="records of each source, words of a dictionary, pairs of --aer, at most"
    )
    add("--lexicons", type=Path, nargs="+", help="dictionaries for alignment and induction (default: lexicon/*.txt)")
    add(
        "--lexicon_heldout",
        type=float,
        metavar="SHARE",
        help="of a dictionary's words, withheld in training: they are measured apart from all others (default: what "
        "the model was trained with, else 0.2; 1: no word was trained)",
    )
    add("--mining", type=Path, nargs="+", default=[], metavar="PREFIX", help="BUCC's files, such as de-en.test for "
        "de-en.test.de, .en and .gold")  # fmt: skip
    add("--mining_dev", type=Path, nargs="+", default=[], metavar="PREFIX", help="likewise, to set the threshold with")
    add(
        "--aer",
        nargs="+",
        action="append",
        default=[],
        metavar="X",
        help="word links made by hand: `en-es FILE.tsv`, or `en-fr TEXT LINKS`; repeatable",
    )
    add(
        "--mteb",
        nargs="+",
        action="append",
        default=[],
        metavar="X",
        help="a task of mteb, the folder of its data, which of its subsets: `XNLI xnli/ de en`; repeatable",
    )
    more = parser.add_argument_group("variants", "Of several values every combination is measured.")
    add = more.add_argument
    add("--pooling", nargs="+", choices=retrieval.POOLINGS, default=["mean"], help="of retrieval, mining, mteb (mean)")
    add(
        "--layer",
        nargs="+",
        type=layer,
        default=[],
        metavar="N",
        help="0: embeddings, -1: last, or all; of retrieval, mining and mteb (default: -1), aer (all), induction "
        "(besides the embedding table)",
    )
    add("--margin", nargs="+", choices=retrieval.MARGINS, default=["cosine"], help="of retrieval, induction (cosine)")


def layer(text: str) -> str | int:
    return text if text == retrieval.ALL else int(text)


def rows_of_pairs(
    args: Namespace, sources: list[Source], measure: Callable[[Source, Exported], Mapping[str, Scores]]
) -> list[TaskRow]:
    """One for each source of sentence pairs."""
    pairs = [source for source in sources if source.kind == "pair"]
    if not pairs:
        where = f"no sentence pairs in {', '.join(map(str, args.data))}" if args.data else "--data is missing"
        raise UserError(f"{where}; tasks alignment, heldout and retrieval need sentence pairs")
    return [TaskRow(source.pair, source.directory, partial(measure, source)) for source in pairs]


def plan_alignment(args: Namespace, sources: list[Source]) -> list[TaskRow]:
    def measure(source: Source, model: Exported) -> dict[str, Scores]:
        lexicons = args.lexicons or find_lexicons(sources, source.directory)
        return {"": alignment_score.evaluate(model, source, sources, lexicons, withheld_share(args, model))}

    return rows_of_pairs(args, sources, measure)


def plan_heldout(args: Namespace, sources: list[Source]) -> list[TaskRow]:
    def measure(source: Source, model: Exported) -> dict[str, Scores]:
        return {"": heldout.evaluate(model, source, args.limit)}

    return rows_of_pairs(args, sources, measure)


def plan_retrieval(args: Namespace, sources: list[Source]) -> list[TaskRow]:
    def measure(source: Source, model: Exported) -> dict[str, Scores]:
        return retrieval.evaluate(model, source, args.limit, args.pooling, args.layer or [-1], args.margin)

    return rows_of_pairs(args, sources, measure)


def plan_perplexity(args: Namespace, sources: list[Source]) -> list[TaskRow]:
    def measure(source: Source, language: str, model: Exported) -> dict[str, Scores]:
        return {"": perplexity.evaluate(model, source, language, args.limit)}

    if not sources:
        raise UserError("task perplexity needs --data: shard directories of held-out text")
    return [
        TaskRow(language, source.directory, partial(measure, source, language))
        for source in sources
        for language in source.langs
    ]


def plan_induction(args: Namespace, sources: list[Source]) -> list[TaskRow]:
    paths = args.lexicons or dict.fromkeys(p for source in sources for p in find_lexicons(sources, source.directory))
    if not paths:
        raise UserError("task induction needs a dictionary: --lexicons PATH/en-de.txt, or lexicon/ beside --data")
    languages = {language for source in sources for language in source.langs}
    by_pair: dict[str, list[Path]] = {}
    for path in paths:
        by_pair.setdefault(pair_name(pair_of(path, languages)), []).append(path)

    def measure(of_pair: list[Path], model: Exported) -> dict[str, Scores]:
        lexicons = {path: load_lexicon(path, model.tokenizer, languages) for path in paths}
        chosen, share = [lexicons[path] for path in of_pair], withheld_share(args, model)
        all_of_them = list(lexicons.values())
        return induction.evaluate(model, chosen, all_of_them, share, args.limit, args.layer, args.margin)

    return [TaskRow(pair, of_pair[0], partial(measure, of_pair)) for pair, of_pair in by_pair.items()]


def plan_mining(args: Namespace, sources: list[Source]) -> list[TaskRow]:
    if not args.mining:
        raise UserError("task mining needs --mining PREFIX, such as bucc/de-en.test for de-en.test.de, .en and .gold")
    pairs, of_dev = ({prefix: name_of(prefix) for prefix in given} for given in (args.mining, args.mining_dev))
    dev = {pair: prefix for prefix, pair in of_dev.items()}
    if absent := dev.keys() - pairs.values():
        raise UserError(f"--mining_dev {dev[absent.pop()]} has no --mining of the same languages")

    def measure(prefix: Path, model: Exported) -> dict[str, Scores]:
        of_dev = mining.load_bitext(dev[pairs[prefix]]) if pairs[prefix] in dev else None
        return mining.evaluate(model, mining.load_bitext(prefix), of_dev, args.pooling, args.layer or [-1])

    return [TaskRow(pair, prefix, partial(measure, prefix)) for prefix, pair in pairs.items()]


def name_of(prefix: Path) -> str:
    return pair_name(mining.languages_of(prefix))


def plan_aer(args: Namespace, sources: list[Source]) -> list[TaskRow]:
    def measure(langs: tuple[str, str], files: list[Path], model: Exported) -> dict[str, Scores]:
        return aer.evaluate(model, aer.load_gold(langs, *files).first(args.limit), args.layer or [retrieval.ALL])

    if not args.aer:
        raise UserError("task aer needs --aer en-es FILE.tsv, or --aer en-fr TEXT LINKS")
    rows = []
    for pair, *files in args.aer:
        langs = cut_pair(pair, {language for source in sources for language in source.langs})
        if langs is None or not 1 <= len(files) <= 2:
            raise UserError(
                f"--aer {' '.join([pair, *files])}: needs `en-es FILE.tsv`, or `en-fr TEXT LINKS`; a country in "
                f"capitals: en-zh-CN"
            )
        paths = [Path(file) for file in files]
        rows.append(TaskRow(pair_name(langs), paths[0], partial(measure, langs, paths)))
    return rows


def plan_mteb(args: Namespace, sources: list[Source]) -> list[TaskRow]:
    def measure(task: Any, model: Exported) -> dict[str, Scores]:
        return mteb_tasks.evaluate(model, task, args.pooling, args.layer or [-1])

    if not args.mteb or any(len(given) < 2 for given in args.mteb):
        raise UserError("task mteb needs --mteb NAME FOLDER, or --mteb NAME FOLDER SUBSET ...")
    rows = []
    for name, folder, *subsets in args.mteb:
        task = mteb_tasks.find_task(name, Path(folder), subsets)
        rows.append(TaskRow(f"{name} {task.metadata.type}", Path(folder), partial(measure, task)))
    return rows


def withheld_share(args: Namespace, model: Exported) -> float:
    return model.lexicon_heldout if args.lexicon_heldout is None else args.lexicon_heldout


TASKS: dict[str, Callable[[Namespace, list[Source]], list[TaskRow]]] = {
    "aer": plan_aer,
    "alignment": plan_alignment,
    "heldout": plan_heldout,
    "induction": plan_induction,
    "mining": plan_mining,
    "mteb": plan_mteb,
    "perplexity": plan_perplexity,
    "retrieval": plan_retrieval,
}
