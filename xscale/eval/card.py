"""The model card of an exported or a fine-tuned model: README.md, with the header that the hub reads."""

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
"""Task -> results row -> name -> a number, or the interval of a number."""
CARD = "README.md"
PIPELINES = {"heldout": "fill-mask", "perplexity": "fill-mask", "aer": "token-classification"}
"""Task -> the hub's name for this kind of task."""
HEADS = {
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
}
"""Class of transformers -> the hub's name for its task."""
SECTIONS = ("Use", "Data", "Training", "Scores", "Intended use", "Limits")
USE = """\
```python
from sentence_transformers import SentenceTransformer
from transformers import AutoModel{head}, AutoTokenizer

tokenizer, model = AutoTokenizer.from_pretrained("{name}"), AutoModel{head}.from_pretrained("{name}")
vectors = SentenceTransformer("{name}").encode(["a sentence"])  # unit vectors, {pooling} pooling
```"""
LIMITS = """\
The model reads at most {longest} tokens. It was not tested for bias or for harmful content; it repeats what its text
says. In languages that it was not trained with, and in text unlike its own, it may be much worse. The scores are of the
text that is named, and compare only with scores of the same text. The header's licence is a placeholder: choose one
that the licences of the data allow."""


def describe_checkpoint(
    checkpoint: Checkpoint, config: Any, name: str, pooling: str, layers: int | None = None
) -> ModelCard:
    """The card of a checkpoint's model. config: the model's config. name: the model's name in the card. layers: the
    number of first layers that the model has; None: all layers."""
    recipe, folder = checkpoint.identity["recipe"], checkpoint.path.parent.parent
    languages, init = config.xscale["languages"][1:], recipe["model"]["init"]
    is_hub_name = bool(init) and not Path(init).exists() and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", init)
    objectives = sorted({stream["objective"] for stream in recipe["streams"].values()})
    sources = [f"- `{of['source']}`, fingerprint `{of['fingerprint'][:12]}`" for of in checkpoint.identity["data"]]
    first, tokens = checkpoint.step, 0
    for entry in lines(folder / "metrics.jsonl"):
        if entry["step"] <= checkpoint.step:
            first, tokens = min(first, entry["step"]), tokens + entry.get("tokens", 0)
    counted = f" and {tokens:,} tokens" * bool(tokens) + f" in those from step {first:,} on" * bool(
        tokens and first > 1
    )
    begun, ranks = init or "random weights", checkpoint.world_size
    for parent in json.loads(read_or_empty(folder / "ancestry.json") or "[]"):
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
        [] if layers else eval_results(*measured_at(folder, checkpoint.step)),
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


def describe_merged(models: list[str], how: str, config: Any, name: str, pooling: str) -> ModelCard:
    """The card of a model that was merged from `models`. config: the merged model's config."""
    languages = (getattr(config, "xscale", None) or {}).get("languages", [])[1:]
    tags = ["xscale", "sentence-transformers", "feature-extraction", "merge"]
    return make_card(
        name,
        {"language": languages or None, "pipeline_tag": "fill-mask", "tags": tags},
        [],
        longest_sequence(config),
        summary=" ".join(["A text encoder", *(["of", ", ".join(languages)] if languages else []), "merged by xscale."]),
        use=USE.format(name=name, pooling=pooling, head="ForMaskedLM"),
        data_used="The data of the models that were merged.",
        training="The merged models ({}):\n\n{}".format(how, "\n".join(f"- `{model}`" for model in models)),
        purpose="That of the models that were merged.",
    )


def describe_finetuned(
    model: Path, task: str, head: str, training: str, settings: Mapping[str, Any], scores: Mapping[str, Any]
) -> ModelCard:
    """The card of a fine-tuned model. model: the encoder's folder. head: the model's transformers class. training: the
    name of the training text. scores: results row -> name -> number."""
    encoder, pipeline = model.resolve().name, HEADS[head]
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
    longest: int,
    *,
    summary: str,
    use: str,
    data_used: str,
    training: str,
    purpose: str,
) -> ModelCard:
    """The card with these fields of the header, and with SECTIONS. longest: the most tokens of a text."""
    data = ModelCardData(
        **header, license="unknown", library_name="transformers", model_name=name, eval_results=results or None
    )
    scores = score_table(results) if results else "No score was measured."
    texts = (use, data_used, training, scores, purpose, LIMITS.format(longest=longest))
    sections = "".join(f"\n## {title}\n\n{text}\n" for title, text in zip(SECTIONS, texts, strict=True))
    return join_card(data, f"# {name}\n\n{summary}\n{sections}")


def join_card(data: ModelCardData, text: str) -> ModelCard:
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}")


def add_scores(folder: Path, results: Results, intervals: Results) -> None:
    """Add scores to the card of a model, in its header and its section Scores."""
    card = ModelCard.load(folder / CARD)
    new = eval_results(results, intervals)
    replaced = {one.dataset_type for one in new}
    old = [one for one in card.data.eval_results or [] if one.dataset_type not in replaced]
    card.data.eval_results, card.data.model_name = old + new, card.data.model_name or folder.resolve().name
    before, _, rest = card.text.partition("## Scores\n")
    _, mark, after = rest.partition("\n## ")
    text = f"{before.strip()}\n\n## Scores\n\n{score_table(card.data.eval_results)}\n{mark}{after}"
    join_card(card.data, text).save(folder / CARD)


def eval_results(results: Results, intervals: Results, kind: str = "sentence-similarity") -> list[EvalResult]:
    """The finite numbers for which higher or lower is better, in the form of the hub's header. kind: the hub's name for
    tasks that PIPELINES lacks."""
    found = []
    rows = [(task, row, numbers) for task, of_task in results.items() for row, numbers in of_task.items()]
    for task, row, name, value in ((task, row, *number) for task, row, numbers in rows for number in numbers.items()):
        if isinstance(value, int | float) and math.isfinite(value) and direction(name):
            interval = intervals.get(task, {}).get(row, {}).get(name)
            found.append(
                EvalResult(
                    task_type=PIPELINES.get(task, kind),
                    task_name=task,
                    dataset_type=f"{task}/{row}",
                    dataset_name=row,
                    metric_type=name,
                    metric_value=float(f"{value:.6g}"),
                    metric_args={"interval_95": [float(f"{bound:.6g}") for bound in interval]} if interval else None,
                )
            )
    return found


def score_table(scores: list[EvalResult]) -> str:
    found = ["| task | text | score | value | 95 % interval |", "|---|---|---|---:|---|"]
    for one in scores:
        low, high = (one.metric_args or {}).get("interval_95", (None, None))
        bounds = "" if low is None else f"{low:.4g} to {high:.4g}"
        found.append(
            f"| {one.task_name} | {one.dataset_name} | {one.metric_type} | {one.metric_value:.4g} | {bounds} |"
        )
    return "\n".join(found)


def measured_at(folder: Path, step: int) -> tuple[Results, Results]:
    """The results and the intervals of the evaluations of a step, the run's own and those of checkpoint.hook."""
    found: dict[str, Any] = {}
    intervals: Results = {}
    for entry in lines(folder / "evals.jsonl"):
        if entry["step"] == step:
            found, intervals = entry.get("results", {}), entry.get("intervals", {})
    hook = folder / "evals" / f"step_{step}.json"
    if hook.is_file():
        written = json.loads(hook.read_text(encoding="utf-8"))
        kept = {task: of_task for task, of_task in intervals.items() if task not in written.get("results", {})}
        found, intervals = found | written.get("results", {}), kept | written.get("intervals", {})
    return found, intervals


def read_or_empty(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a run's file, one per line; nothing if the file is absent."""
    if path.is_file():
        with path.open(encoding="utf-8") as file:
            yield from (json.loads(line) for line in file if line.endswith("\n"))
