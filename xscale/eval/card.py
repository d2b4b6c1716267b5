"""Makes the card of an exported or fine-tuned model: README.md, with the header that the hub reads."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from xscale.checkpoint.store import Checkpoint
from xscale.eval.bootstrap import intervals
from xscale.metric_keys import direction
from xscale.models.build import longest_sequence

Results = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""{task: {results row: {metric: a number, or the interval of a number}}}."""
CARD = "README.md"
PIPELINES = {"heldout": "fill-mask", "perplexity": "fill-mask", "aer": "token-classification"}
"""{task: the hub's name for this type of task}."""
HEADS = {
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
}
"""{class of transformers: the hub's name for its task}."""
SECTIONS = ("Use", "Data", "Training", "Scores", "Intended use", "Limits")
USE = """\
```python
from sentence_transformers import SentenceTransformer
from transformers import AutoModel{head}, AutoTokenizer

tokenizer, model = AutoTokenizer.from_pretrained("{name}"), AutoModel{head}.from_pretrained("{name}")
vectors = SentenceTransformer("{name}").encode(["a sentence"])  # unit vectors, {pooling} pooling
```"""
LIMITS = """\
The model reads at most {max_length} tokens. It was not tested for bias or for harmful content, and may repeat what its
training text says. It may be much worse in languages, and on kinds of text, that it was not trained on. Compare scores
only on the same text. The header's licence is a placeholder: choose one that the licences of the data allow."""


def checkpoint_card(
    checkpoint: Checkpoint, config: Any, name: str, pooling: str, layers: int | None = None
) -> ModelCard:
    """Return the card of an exported checkpoint. layers: the number of first layers that the export has; None: all."""
    recipe, folder = checkpoint.identity["recipe"], checkpoint.path.parent.parent
    languages, init = config.xscale["languages"][1:], recipe["model"]["init"]
    is_hub_name = bool(init) and not Path(init).exists() and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", init)
    objectives = sorted({stream["objective"] for stream in recipe["streams"].values()})
    sources = [f"- `{of['source']}`, fingerprint `{of['fingerprint'][:12]}`" for of in checkpoint.identity["data"]]
    first, tokens = checkpoint.step, 0
    for entry in read_json_lines(folder / "metrics.jsonl"):
        if entry["step"] <= checkpoint.step:
            first, tokens = min(first, entry["step"]), tokens + entry.get("tokens", 0)
    counted = f" and {tokens:,} tokens" * bool(tokens) + f" in those from step {first:,} on" * bool(
        tokens and first > 1
    )
    begun, ranks = init or "random weights", checkpoint.world_size
    ancestry = folder / "ancestry.json"
    for parent in json.loads((ancestry.is_file() and ancestry.read_text(encoding="utf-8")) or "[]"):
        begun += f"; the steps to {parent['step']:,} are those of the run {Path(parent['run']).name}"
    header = {
        "language": languages,
        "pipeline_tag": "feature-extraction" if layers else "fill-mask",
        "base_model": init if is_hub_name else None,
        "tags": ["xscale", "sentence-transformers", "feature-extraction", *objectives],
    }
    return make_card(
        name,
        header,
        [] if layers else eval_results(*read_step_scores(folder, checkpoint.step)),
        longest_sequence(config),
        summary=f"A text encoder of {', '.join(languages)}, trained by xscale. Objectives: {', '.join(objectives)}."
        + (f" These are its first {layers} layers, without the masked-LM head." if layers else ""),
        use=USE.format(name=name, pooling=pooling, head="" if layers else "ForMaskedLM"),
        data_used="\n".join(["The shards that it was trained on, by their languages:", "", *sources]),
        training=f"{checkpoint.step:,} optimizer steps{counted}, from {begun}; the last start was "
        f"on {ranks} rank{'s' * (ranks > 1)}. The recipe:\n\n```yaml\n{yaml.safe_dump(recipe, sort_keys=False)}```",
        purpose="Sentence vectors for retrieval and mining across languages, word alignment, "
        "fine-tuning of classifiers, taggers and question answering" + ("." if layers else ", masked prediction."),
    )


def finetuned_card(
    model: Path, task: str, head_class: str, training: str, settings: Mapping[str, Any], scores: Mapping[str, Any]
) -> ModelCard:
    """Return the card of a fine-tuned model. model: the encoder's folder. head_class: the model's transformers class.
    training: the name of the training text. scores: {results row: {metric: number}}."""
    encoder, pipeline = model.resolve().name, HEADS[head_class]
    name, results = f"{encoder}-{task}", eval_results({task: scores}, intervals({task: scores}), pipeline)
    before = ModelCard.load(model / CARD).data if (model / CARD).is_file() else ModelCardData()
    header = {"language": before.language, "base_model": before.base_model}
    return make_card(
        name,
        header | {"pipeline_tag": pipeline, "tags": ["xscale", task]},
        results,
        settings["max_length"],
        summary=f"{encoder}, fine-tuned for {task} by xscale.",
        use=f'`transformers.pipeline("{pipeline}", "{name}")`',
        data_used=f"The training text of {training}.",
        training=f"By transformers' Trainer:\n\n```yaml\n{yaml.safe_dump(dict(settings), sort_keys=False)}```",
        purpose=f"The task {task}, in the language of its training text and, by transfer, in others.",
    )


def make_card(
    name: str,
    header: dict[str, Any],
    results: list[EvalResult],
    max_length: int,
    *,
    summary: str,
    use: str,
    data_used: str,
    training: str,
    purpose: str,
) -> ModelCard:
    """Return a card with this header and with SECTIONS. max_length: the most tokens of a text."""
    data = ModelCardData(
        **header, license="unknown", library_name="transformers", model_name=name, eval_results=results or None
    )
    scores = score_table(results) if results else "No score was measured."
    texts = (use, data_used, training, scores, purpose, LIMITS.format(max_length=max_length))
    sections = "".join(f"\n## {title}\n\n{text}\n" for title, text in zip(SECTIONS, texts, strict=True))
    return join_card(data, f"# {name}\n\n{summary}\n{sections}")


def join_card(data: ModelCardData, text: str) -> ModelCard:
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}")


def add_scores(folder: Path, results: Results, intervals: Results, paths: Mapping[str, Mapping[str, Path]]) -> None:
    """Add scores to a model's card, in its header and its section Scores. A task's new row replaces the old row of the
    same text. paths: {task: {results row without its variant: path of the text, of which the card names the end}}."""
    card = ModelCard.load(folder / CARD)
    named: dict[str, dict[str, Any]] = {}
    bounds: dict[str, dict[str, Any]] = {}
    for task, rows in results.items():
        for row, numbers in rows.items():
            path = paths[task][max((name for name in paths[task] if row.startswith(name)), key=len)]
            name = f"{row.replace(f' ({path})', '')} ({'/'.join(path.absolute().parts[-2:])})"
            named.setdefault(task, {})[name] = numbers
            bounds.setdefault(task, {})[name] = intervals.get(task, {}).get(row, {})
    new = eval_results(named, bounds)
    replaced = {one.dataset_type for one in new}
    old = [one for one in card.data.eval_results or [] if one.dataset_type not in replaced]
    card.data.eval_results, card.data.model_name = old + new, card.data.model_name or folder.resolve().name
    before, _, rest = card.text.partition("## Scores\n")
    _, mark, after = rest.partition("\n## ")
    text = f"{before.strip()}\n\n## Scores\n\n{score_table(card.data.eval_results)}\n{mark}{after}"
    join_card(card.data, text).save(folder / CARD)


def eval_results(results: Results, intervals: Results, pipeline: str = "sentence-similarity") -> list[EvalResult]:
    """Return the finite numbers with a better direction as the header lists them. pipeline: for tasks not in
    PIPELINES."""
    entries = []
    rows = [(task, row, numbers) for task, of_task in results.items() for row, numbers in of_task.items()]
    for task, row, name, value in ((task, row, *number) for task, row, numbers in rows for number in numbers.items()):
        if isinstance(value, int | float) and math.isfinite(value) and direction(name):
            interval = intervals.get(task, {}).get(row, {}).get(name)
            entries.append(
                EvalResult(
                    task_type=PIPELINES.get(task, pipeline),
                    task_name=task,
                    dataset_type=f"{task}/{row}",
                    dataset_name=row,
                    metric_type=name,
                    metric_value=float(f"{value:.6g}"),
                    metric_args={"interval_95": [float(f"{bound:.6g}") for bound in interval]} if interval else None,
                )
            )
    return entries


def score_table(scores: list[EvalResult]) -> str:
    lines = ["| task | text | score | value | 95 % interval |", "|---|---|---|---:|---|"]
    for one in scores:
        low, high = (one.metric_args or {}).get("interval_95", (None, None))
        bounds = "" if low is None else f"{low:.4g} to {high:.4g}"
        cells = one.task_name, one.dataset_name, one.metric_type, f"{one.metric_value:.4g}", bounds
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def read_step_scores(folder: Path, step: int) -> tuple[Results, Results]:
    """Return the results of a step's evaluations, the run's own and those of checkpoint.hook, and their intervals."""
    results: dict[str, Any] = {}
    intervals: Results = {}
    for entry in read_json_lines(folder / "evals.jsonl"):
        if entry["step"] == step:
            results, intervals = entry.get("results", {}), entry.get("intervals", {})
    hook = folder / "evals" / f"step_{step}.json"
    if hook.is_file():
        written = json.loads(hook.read_text(encoding="utf-8"))
        kept = {task: of_task for task, of_task in intervals.items() if task not in written.get("results", {})}
        results, intervals = results | written.get("results", {}), kept | written.get("intervals", {})
    return results, intervals


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON object of each line; nothing if the file is absent."""
    if path.is_file():
        with path.open(encoding="utf-8") as file:
            yield from (json.loads(line) for line in file if line.endswith("\n"))
