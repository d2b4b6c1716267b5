"""Languages as corpora name them (BCP 47): zh-CN, pt-BR, zh-Hans. A pair of them is joined by "-" too."""

import shutil
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from data_tools import write_shards
from tests.launch import open_run
from xscale.data.lexicon import languages_in_file_name, split_pair_name
from xscale.data.mixture import initial_state, probabilities_of_stream_sources
from xscale.data.scripts import check_language_name
from xscale.data.shards import find_sources
from xscale.errors import UserError
from xscale.metric_keys import count_key
from xscale.ranks import Process
from xscale.run.resolve import resolve_run

pytestmark = pytest.mark.usefixtures("quick_calibration")

PAIRS = {("en", "zh-CN"): 200, ("zh-CN", "pt-BR"): 100, ("en", "zh-Hant"): 60}


@pytest.fixture(scope="module")
def data(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo corpus's sentences under other names, and its dictionary."""
    folder = tmp_path_factory.mktemp("names")
    source = next(source for source in find_sources([demo]) if source.kind == "pair")
    texts = [source.read(0, record).texts for record in range(200)]
    for side in (0, 1):
        (folder / f"{side}.txt").write_text("".join(f"{pair[side]}\n" for pair in texts), encoding="utf-8")
    for langs, records in PAIRS.items():
        for side in (0, 1):
            (folder / f"some.{side}").write_text("".join(f"{pair[side]}\n" for pair in texts[:records]))
        files = ["--src", folder / "some.0", "--tgt", folder / "some.1", "--langs", *langs]
        write_shards.main([*map(str, ["pairs", *files, "--out", folder / "data" / "+".join(langs)])])
    for language, text in (("en", "0.txt"), ("zh-CN", "1.txt")):
        files = ["--text", folder / text, "--lang", language, "--out", folder / "data" / language]
        write_shards.main([*map(str, ["mono", *files])])
    shutil.copytree(demo / "tokenizer", folder / "data" / "tokenizer")
    (folder / "data" / "lexicon").mkdir()
    shutil.copy(demo / "lexicon" / "en-xx.txt", folder / "data" / "lexicon" / "en-zh-CN.txt")
    return folder / "data"


def test_what_is_drawn_is_counted_by_pair(data: Path) -> None:
    sets = ["data.workers=0", "streams.tlm.samples=36", "streams.mlm.samples=8", "train.max_tokens=512"]
    languages = "[zh-CN-en, zh-CN-pt-BR, en-zh-Hant]"  # either way round
    loader = open_run("xlm", [*sets, f"streams.tlm.languages={languages}", "streams.mlm.languages=[zh-CN]"], [data])
    names = {
        spec.name: sorted(loader.corpus.sources[s].langs_name for s in spec.sources) for spec in loader.last_streams
    }
    assert names == {"mlm": ["zh-CN"], "tlm": ["en-zh-CN", "en-zh-Hant", "zh-CN-pt-BR"]}
    tlm = next(spec for spec in loader.last_streams if spec.name == "tlm")
    sizes = [source.records for source in loader.corpus.sources]
    weights = dict(
        zip(tlm.sources, probabilities_of_stream_sources(tlm, loader.corpus.sources, 0.7, sizes), strict=True)
    )
    total = sum(n**0.7 for n in PAIRS.values())
    assert {loader.corpus.sources[s].langs: p for s, p in weights.items()} == pytest.approx(
        {langs: n**0.7 / total for langs, n in PAIRS.items()}
    )
    state = initial_state(loader.last_streams)
    drawn = Counter[str]()
    for batch in islice(loader.batches(Process(0, 1, 0, 1), "cpu", state, 5), 5):
        pairs = set[str]()
        targets = Counter[str]()
        for key, number in batch.counts().items():
            if key.name == "drawn":
                drawn[key.language] += number
                pairs.add(key.language)
            elif key == count_key(key.stream, "mlm", key.language) and key.language:
                targets[key.stream] += number
        assert pairs == {"en-zh-CN", "pt-BR-zh-CN", "en-zh-Hant"}
        for stream in ("tlm", "mlm"):
            assert targets[stream] == batch.counts_without_languages()[count_key(stream, "mlm")]
    assert drawn.total() == 5 * 36 and drawn["en-zh-CN"] > drawn["pt-BR-zh-CN"] > drawn["en-zh-Hant"] > 0


def test_dictionaries_of_such_languages(data: Path) -> None:
    _, corpus = resolve_run("dict_mlm", ["data.workers=0", "streams.dict_mlm.languages=[zh-CN]"], [data])
    assert [(lexicon.langs, len(lexicon.words) > 100) for lexicon in corpus.lexicons] == [(("en", "zh-CN"), True)]
    with pytest.raises(UserError, match=r"reads sentence pairs in en-zh-SG, but --data has only .*en-zh-CN \(pair\)"):
        resolve_run("tlm", ["streams.tlm.languages=[en-zh-SG]"], [data])


@pytest.mark.parametrize(
    ("name", "languages", "found"),
    [
        ("en-zh-CN", (), ("en", "zh-CN")),
        ("pt-BR-en", (), ("pt-BR", "en")),
        ("zh-Hans-zh-Hant", (), ("zh-Hans", "zh-Hant")),
        ("zh-Hans-CN-es-419", (), ("zh-Hans-CN", "es-419")),
        ("zh_Hant-en", (), ("zh_Hant", "en")),
        ("en-pt-br", (), None),
        ("en-pt-br", ("en", "pt-br", "pt"), ("en", "pt-br")),
        ("en-zh-yue", ("en", "zh-yue"), ("en", "zh-yue")),
        ("en-zh", ("en", "zh-CN"), ("en", "zh")),
        ("zh-CN", (), None),
        ("zh-CN", ("zh", "CN"), ("zh", "CN")),
        ("a-b-c", ("a", "b-c", "a-b", "c"), None),
        ("en", ("en",), None),
    ],
)
def test_a_joined_name_is_cut_where_languages_meet(name: str, languages: tuple[str, ...], found: object) -> None:
    assert split_pair_name(name, languages) == found
    if found is None:
        with pytest.raises(UserError, match=rf"{name}\.txt: .*en-de\.txt.*en-zh-CN\.txt"):
            languages_in_file_name(Path(f"{name}.txt"), languages)


def test_codes_and_invented_names_are_names_of_languages() -> None:
    for name in ("de", "xx", "yy", "deu", "eng_Latn", "zh-Hans", "sr_Cyrl", "es-419", "german1"):
        check_language_name(name)
    for name in ("german", "English", "deutsch"):
        with pytest.raises(ValueError, match=f"'{name}' is not a language code. Write a code of two or three letters"):
            check_language_name(name)


@pytest.mark.parametrize("name", ["zh CN", "-en", "en-", "a--b", "zh/CN", ""])
def test_a_name_that_is_none_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a b\n")
    with pytest.raises(UserError, match=rf"'{name}' is not the name of a language.*zh-Hant"):
        write_shards.main(["mono", "--text", str(tmp_path / "text"), f"--lang={name}", "--out", "x"])
