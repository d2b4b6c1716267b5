"""The tasks of `xscale.eval.run`: each function plan_* checks the flags and returns the results rows to evaluate."""

import argparse
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from xscale.data.lexicon import cut_pair, find_lexicon_paths, load_lexicon, pair_of
from xscale.data.shards import Source, pair_name
from xscale.errors import UserError
from xscale.eval import aer, alignment_score, heldout, induction, mining, mteb_tasks, retrieval
from xscale.eval.model import ExportedModel, Scores, read_texts
from xscale.eval.parallel import ParallelText, find_parallel_texts


class TaskRow(NamedTuple):
    """A row of a task's results, before it is evaluated."""

    name: str
    """A language, a pair of languages in alphabetical order, or a task of mteb with its type."""
    path: Path
    """The path of the row's data, which tells apart rows with the same name."""
    evaluate: Callable[[ExportedModel], Mapping[str, Scores]]
    """Returns {variant: scores}; a task without variants has the only variant ""."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--data", type=Path, nargs="+", default=[], help="shards of held-out text; for alignment, of any text")
    add("--texts", type=Path, nargs="+", default=[], metavar="DIR", help="folders of public test sets as they are; for "
        "retrieval, a file per language, whose lines n translate one another (FLORES, NTREX, Tatoeba)")  # fmt: skip
    add("--pairs", choices=("english", "all"), default="english", help="pairs of --texts (default: with English)")
    add("--limit", type=int, help="maximum of records of a source, words of a dictionary, pairs of --aer (default: "
        "1000), or lines of --texts (default: all)")  # fmt: skip
    add("--xsim_plus", type=Path, metavar="FILE.json", help="xSIM++'s wrong translations, as LASER has them; with "
        "--margin xsim")  # fmt: skip
    add("--lexicons", type=Path, nargs="+", help="dictionaries for alignment and induction (default: lexicon/*.txt)")
    add("--lexicon_heldout", type=float, metavar="SHARE", help="share of a dictionary's words that training withheld; "
        "their scores are separate (default: the model's own, else 0.2; 1: no word was trained)")  # fmt: skip
    add("--mining", type=Path, nargs="+", default=[], metavar="PREFIX", help="BUCC's files, such as de-en.test for "
        "de-en.test.de, .en and .gold")  # fmt: skip
    add("--mining_dev", type=Path, nargs="+", default=[], metavar="PREFIX", help="BUCC's files that set the threshold")
    repeated: dict[str, Any] = {"nargs": "+", "action": "append", "default": [], "metavar": "X"}
    add("--aer", **repeated, help="word links made by hand: `en-es FILE.tsv`, or `en-fr TEXT LINKS`; repeatable")
    add("--mteb", **repeated, help="a task of mteb, the folder of its data, its subsets: `XNLI xnli/ de`; repeatable")
    add("--finetune", default="", metavar="FLAGS", help="further flags of xscale.eval.finetune for the suite transfer, "
        "such as '--seeds 0 --epochs 2'")  # fmt: skip
    group = parser.add_argument_group("variants of sentence vectors", "Every combination of the values is evaluated.")
    add = group.add_argument
    add("--pooling", nargs="+", choices=retrieval.POOLINGS, help="for retrieval, mining, mteb (default: the "
        "model's own, by which SentenceTransformer pools)")  # fmt: skip
    add("--layer", nargs="+", type=parse_layer, default=[], metavar="N", help="0: embeddings, -1: last, or all; for "
        "retrieval, mining, mteb (default: -1), aer (all), induction (besides the embedding table)")  # fmt: skip
    add("--margin", nargs="+", choices=(*retrieval.MARGINS, retrieval.XSIM), default=["cosine"], help="for retrieval, "
        "induction (cosine); xsim, LASER's error rate, for retrieval alone")  # fmt: skip


def parse_layer(text: str) -> str | int:
    return text if text == retrieval.ALL else int(text)


def rows_of_pairs(
    args: Namespace, sources: list[Source], evaluate: Callable[[Source, ExportedModel], Mapping[str, Scores]]
) -> list[TaskRow]:
    """Return a row for each source of sentence pairs. Raises UserError if there is none."""
    pairs = [source for source in sources if source.kind == "pair"]
    if not pairs:
        where = f"no sentence pairs in {', '.join(map(str, args.data))}" if args.data else "--data is missing"
        raise UserError(f"{where}; tasks alignment, heldout and retrieval need sentence pairs")
    return [TaskRow(source.pair, source.directory, partial(evaluate, source)) for source in pairs]


def plan_alignment(args: Namespace, sources: list[Source]) -> list[TaskRow]:
    def evaluate(source: Source, model: ExportedModel) -> dict[str, Scores]:
        share = withheld_share(args, model)
        return {"": alignment_score.evaluate(model, source, sources, lexicon_paths(args, sources), share)}

    rows = rows_of_pairs(args, sources, evaluate)
    return list({row.name: row for row in reversed(rows)}.values())[::-1]  # one for all sources of a pair


def lexicon_paths(args: Namespace, sources: list[Source]) -> list[Path]:
    """Return --lexicons, or else the dictionaries that lie beside the sources."""
    found = (path for source in sources for path in find_lexicon_paths(sources, source.directory))
    return args.lexicons or list(dict.fromkeys(found))


def plan_heldout(args: Namespace, sources: list[Source]) -> list[TaskRow]:
    return rows_of_pairs(args, sources, lambda source, model: {"": heldout.evaluate(model, source, args.limit)})


def plan_retrieval(args: Namespace, sources: list[Source]) -> list[TaskRow]:
    def evaluate(source: Source, model: ExportedModel) -> dict[str, Scores]:
        return retrieval.evaluate(model, source, args.limit, variants_from_flags(args, model), wrong)

    wrong = retrieval.load_wrong_translations(args.xsim_plus)
    rows = parallel_rows(args, [text for folder in args.texts for text in find_parallel_texts(folder)])
    if args.texts and not rows and not args.data:
        raise UserError(
            f"--texts {' '.join(map(str, args.texts))}: no parallel text; give folders with files whose lines n are "
            f"the same sentence in two languages, such as eng_Latn.devtest and deu_Latn.devtest"
        )
    return [*rows, *(rows_of_pairs(args, sources, evaluate) if args.data or not rows else [])]


def parallel_rows(args: Namespace, texts: list[ParallelText]) -> list[TaskRow]:
    """Return a row of task retrieval for each pair of languages of each text."""
    wrong, limit = retrieval.load_wrong_translations(args.xsim_plus), args.texts_limit

    def evaluate(text: ParallelText, langs: tuple[str, str], model: ExportedModel) -> dict[str, Scores]:
        variants = variants_from_flags(args, model)
        keys, lines = [variant.vectors for variant in variants], [text.texts[language][:limit] for language in langs]
        sides = [text.vectors(model, language, keys, limit) for language in langs]
        return retrieval.evaluate_vectors(model, sides, lines, langs, variants, wrong)

    return [
        TaskRow(pair_name(langs), Path(text.name), partial(evaluate, text, langs))
        for text in texts
        for langs in text.pairs(args.pairs == "all")
    ]


def variants_from_flags(args: Namespace, model: ExportedModel) -> list[retrieval.Variant]:
    return retrieval.make_variants(model, args.pooling, args.layer or [-1], args.margin)


def plan_perplexity(args: Namespace, sources: list[Source]) -> list[TaskRow]:
    def evaluate(source: Source, language: str, model: ExportedModel) -> dict[str, Scores]:
        texts = [texts[source.langs.index(language)] for texts in read_texts(source, args.limit)]
        return {"": heldout.evaluate_perplexity(model, texts, language, source.directory)}

    if not sources:
        raise UserError("task perplexity needs --data: shard directories of held-out text")
    return [
        TaskRow(language, source.directory, partial(evaluate, source, language))
        for source in sources
        for language in source.langs
    ]


def plan_induction(args: Namespace, sources: list[Source]) -> list[TaskRow]:
    paths = lexicon_paths(args, sources)
    if not paths:
        raise UserError("task induction needs a dictionary: --lexicons PATH/en-de.txt, or lexicon/ beside --data")
    languages = {language for source in sources for language in source.langs}
    by_pair: dict[str, list[Path]] = {}
    for path in paths:
        by_pair.setdefault(pair_name(pair_of(path, languages)), []).append(path)

    def evaluate(paths_of_pair: list[Path], model: ExportedModel) -> dict[str, Scores]:
        lexicons = {path: load_lexicon(path, model.tokenizer, languages) for path in paths}
        of_pair, share = [lexicons[path] for path in paths_of_pair], withheld_share(args, model)
        margins = [margin for margin in args.margin if margin in retrieval.MARGINS] or ["cosine"]
        return induction.evaluate(model, of_pair, [*lexicons.values()], share, args.limit, args.layer, margins)

    return [TaskRow(pair, of_pair[0], partial(evaluate, of_pair)) for pair, of_pair in by_pair.items()]


def plan_mining(args: Namespace, sources: list[Source]) -> list[TaskRow]:
    if not args.mining:
        raise UserError("task mining needs --mining PREFIX, such as bucc/de-en.test for de-en.test.de, .en and .gold")
    pairs, dev_pairs = (
        {prefix: pair_name(mining.prefix_languages(prefix)) for prefix in prefixes}
        for prefixes in (args.mining, args.mining_dev)
    )
    dev = {pair: prefix for prefix, pair in dev_pairs.items()}
    if absent := dev.keys() - pairs.values():
        raise UserError(f"--mining_dev {dev[absent.pop()]} has no --mining of the same languages; add it")

    def evaluate(prefix: Path, pair: str, model: ExportedModel) -> dict[str, Scores]:
        dev_bitext = mining.load_bitext(dev[pair]) if pair in dev else None
        variants = retrieval.make_variants(model, args.pooling, args.layer or [-1])
        return mining.evaluate(model, mining.load_bitext(prefix), dev_bitext, variants)

    return [TaskRow(pair, prefix, partial(evaluate, prefix, pair)) for prefix, pair in pairs.items()]


def plan_aer(args: Namespace, sources: list[Source]) -> list[TaskRow]:
    def make_row(pair: str, files: list[Path]) -> TaskRow:
        langs = cut_pair(pair, {language for source in sources for language in source.langs})
        if langs is None or not 1 <= len(files) <= 2:
            raise UserError(
                f"--aer {' '.join([pair, *map(str, files)])}: give `en-es FILE.tsv`, or `en-fr TEXT LINKS`, with "
                f"countries in capitals: en-zh-CN"
            )

        def evaluate(model: ExportedModel) -> dict[str, Scores]:
            links = aer.load_hand_links(langs, *files).first(args.limit)
            return aer.evaluate(model, links, args.layer or [retrieval.ALL])

        return TaskRow(pair_name(langs), files[0], evaluate)

    if not args.aer:
        raise UserError("task aer needs --aer en-es FILE.tsv, or --aer en-fr TEXT LINKS")
    return [make_row(pair, list(map(Path, files))) for pair, *files in args.aer]


def plan_mteb(args: Namespace, sources: list[Source]) -> list[TaskRow]:
    def evaluate(task: Any, model: ExportedModel) -> dict[str, Scores]:
        return mteb_tasks.evaluate(model, task, retrieval.make_variants(model, args.pooling, args.layer or [-1]))

    if not args.mteb or any(len(words) < 2 for words in args.mteb):
        raise UserError("task mteb needs --mteb NAME FOLDER, or --mteb NAME FOLDER SUBSET ...")
    rows = []
    for name, folder, *subsets in args.mteb:
        task = mteb_tasks.find_task(name, Path(folder), subsets)
        rows.append(TaskRow(f"{name} {task.metadata.type}", Path(folder), partial(evaluate, task)))
    return rows


def withheld_share(args: Namespace, model: ExportedModel) -> float:
    """Return the share of a dictionary's words that training withheld."""
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
