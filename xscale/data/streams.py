"""The sources that each stream of a recipe reads."""

from xscale.data.shards import Source
from xscale.errors import UserError


def matches_languages(languages: list[str], langs: tuple[str, ...]) -> bool:
    """Return True if `languages` lists the language or pair `langs`: "en-de", "de-en", or both "en" and "de"."""
    return not both_names(langs).isdisjoint(languages) or set(langs) <= set(languages)


def both_names(langs: tuple[str, ...]) -> set[str]:
    """Return the names "en-de" and "de-en" of a pair, or the one name of a language."""
    return {"-".join(langs), "-".join(langs[::-1])}


def check_languages(languages: list[str] | None, sources: list[Source]) -> None:
    """Raise UserError unless the sources have data for each of `languages`, the value of data.languages."""
    there = {name for source in sources for name in {*both_names(source.langs), *source.langs}}
    if absent := [language for language in languages or [] if language not in there]:
        raise UserError(f"data.languages: --data has no text in {', '.join(absent)}, only {', '.join(sorted(there))}")


def select_sources(
    stream: str, reads: str, languages: list[str] | None, sources: list[Source], of_all: list[str] | None = None
) -> tuple[int, ...]:
    """Return the indices of the sources that a stream samples from. of_all: data.languages, which is used if the stream
    has no languages of its own. Raises UserError if there is no source for the stream, or for one of its languages."""
    fitting = [i for i, source in enumerate(sources) if source.kind == reads]
    if languages is None and of_all is not None:
        fitting = [i for i in fitting if matches_languages(of_all, sources[i].langs)]
    available = sorted({sources[i].pair for i in fitting})
    if languages is not None:
        chosen = [i for i in fitting if matches_languages(languages, sources[i].langs)]
        covered = {name for i in chosen for name in {*both_names(sources[i].langs), *sources[i].langs}}
        absent = [language for language in languages if language not in covered]
        if absent:
            raise UserError(
                f"streams.{stream}.languages: no {reads} data for {', '.join(absent)}; --data has "
                f"{', '.join(available) or 'none'}. Add a shard directory or take the language out"
            )
        fitting = chosen
    if not fitting:
        kinds = ", ".join(f"{source.pair} ({source.kind})" for source in sources)
        only = f" in {', '.join(of_all)}" if of_all and languages is None else ""
        raise UserError(
            f"streams.{stream} reads {reads} records{only}, --data has only: {kinds}. Add a directory written by "
            f"`python -m data_tools.write_shards {'pairs' if reads == 'pair' else 'mono'}`"
        )
    return tuple(fitting)
