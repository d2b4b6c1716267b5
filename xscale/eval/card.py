"""Makes the card of an exported model: README.md, from the template card.md, with the hub's header."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from xscale.checkpoint.store import Checkpoint
from xscale.metric_keys import direction
from xscale.models.build import longest_sequence

Results = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""{task: {results row: {metric: a number, or the interval of a number}}}."""
CARD = "README.md"
TEMPLATE = Path(__file__).with_name("card.md")
OLDEST = {"modernbert": "4.48"}
"""{type of a model: the oldest version of transformers that has it}, for types that are newer than 4.0."""
PIPELINES = {"heldout": "fill-mask", "aer": "token-classification"}
"""{task: the hub's name for this type of task}."""
USE = """\
```python
from sentence_transformers import SentenceTransformer
from transformers import AutoModel{head}, AutoTokenizer

tokenizer, model = AutoTokenizer.from_pretrained("{name}"), AutoModel{head}.from_pretrained("{name}")
vectors = SentenceTransformer("{name}").encode(["a sentence"])  # unit vectors, {pooling} pooling
```

It needs transformers {oldest} or newer."""


def checkpoint_card(
    checkpoint: Checkpoint, config: Any, name: str, pooling: str, layers: int | None = None
) -> ModelCard:
    """Return the card of an exported checkpoint. layers: the number of first layers that the export has; None: all."""
    recipe = checkpoint.identity["recipe"]
    languages = config.xscale["languages"][1:]
    init = recipe["model"]["init"]
    objectives = sorted({stream["objective"] for stream in recipe["streams"].values()})
    sources = [
        f"- `{data['source']}`, fingerprint `{data['fingerprint'][:12]}`" for data in checkpoint.identity["data"]
    ]
    summary = f"A text encoder of {', '.join(languages)}, trained by xscale. Objectives: {', '.join(objectives)}."
    purpose = (
        "Sentence vectors for retrieval across languages, word alignment, fine-tuning of classifiers, taggers and "
    )
    purpose += "question answering"
    header = {
        "language": languages,
        "pipeline_tag": "feature-extraction" if layers else "fill-mask",
        "base_model": init if is_hub_name(init) else None,
        "tags": ["xscale", "sentence-transformers", "feature-extraction", *objectives],
    }
    evaluation = {} if layers else read_evaluation(checkpoint)
    oldest = OLDEST.get(config.model_type, "4.0")
    return make_card(
        name,
        header,
        eval_results(evaluation.get("results", {}), evaluation.get("intervals", {})),
        max_length=longest_sequence(config),
        summary=summary + f" These are its first {layers} layers, without the masked-LM head." if layers else summary,
        use=USE.format(name=name, pooling=pooling, head="" if layers else "ForMaskedLM", oldest=oldest),
        data="\n".join(["The shards that it was trained on, by their languages:", "", *sources]),
        training=f"{checkpoint.step:,} optimizer steps from {init or 'random weights'}, with the recipe",
        settings=recipe,
        purpose=purpose + ("." if layers else ", masked prediction."),
    )


def is_hub_name(init: str | None) -> bool:
    if not init or Path(init).exists():
        return False
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", init) is not None


def make_card(
    name: str, header: dict[str, Any], scores: list[EvalResult], settings: dict[str, Any], **texts: Any
) -> ModelCard:
    """Return the card. settings: the recipe or settings that it shows. texts: the other fields of the template."""
    data = ModelCardData(
        **header, license="unknown", library_name="transformers", model_name=name, eval_results=scores or None
    )
    shown = yaml.safe_dump(settings, sort_keys=False)
    return ModelCard.from_template(data, str(TEMPLATE), name=name, scores=scores, settings=shown, **texts)


def eval_results(results: Results, intervals: Results, pipeline: str = "sentence-similarity") -> list[EvalResult]:
    """Return the finite numbers with a better direction as the header lists them. pipeline: for tasks not in
    PIPELINES."""
    entries = []
    for task, rows in results.items():
        for row, numbers in rows.items():
            for name, value in numbers.items():
                if not isinstance(value, int | float) or not math.isfinite(value) or not direction(name):
                    continue
                interval = intervals.get(task, {}).get(row, {}).get(name)
                entry = EvalResult(
                    task_type=PIPELINES.get(task, pipeline),
                    task_name=task,
                    dataset_type=f"{task}/{row}",
                    dataset_name=row,
                    metric_type=name,
                    metric_value=float(f"{value:.6g}"),
                )
                if interval:
                    entry.metric_args = {"interval_95": [float(f"{bound:.6g}") for bound in interval]}
                entries.append(entry)
    return entries


def read_evaluation(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the line of the run's evals.jsonl for the checkpoint's step, with results and intervals; {} if there is
    none."""
    path = checkpoint.path.parent.parent / "evals.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    evaluation: dict[str, Any] = {}
    for line in lines:
        if line.endswith("\n"):  # the last line may be cut off
            entry = json.loads(line)
            if entry["step"] == checkpoint.step:
                evaluation = entry
    return evaluation
