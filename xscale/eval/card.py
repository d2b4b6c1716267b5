"""Makes the card of an exported model, README.md, from the template card.md: the hub's header and a page of text."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from xscale.checkpoint.store import Checkpoint
from xscale.eval.sentence_files import SentenceVectors
from xscale.metric_keys import direction
from xscale.models.build import longest_sequence

CARD = "README.md"
TEMPLATE = Path(__file__).with_name("card.md")
OLDEST = {"modernbert": "4.48"}
"""{type of a model: the oldest version of transformers that has it}, for types that are newer than 4.0."""
PIPELINES = {"heldout": "fill-mask", "aer": "token-classification"}
"""{task: the hub's name for this type of task}."""
Numbers = Mapping[str, Any]


def checkpoint_card(
    checkpoint: Checkpoint, config: Any, name: str, vectors: SentenceVectors, layers: int | None = None
) -> ModelCard:
    """Return the card of an exported checkpoint. config: the config of the model. layers: the number of first layers
    that the export has; None: all."""
    recipe = checkpoint.identity["recipe"]
    init = recipe["model"]["init"]
    objectives = sorted({stream["objective"] for stream in recipe["streams"].values()})
    scores = [] if layers else eval_results(read_evaluation(checkpoint))
    header = ModelCardData(
        language=config.xscale["languages"][1:],
        license="unknown",
        library_name="transformers",
        pipeline_tag="feature-extraction" if layers else "fill-mask",
        base_model=init if is_hub_name(init) else None,
        model_name=name,
        tags=["xscale", "sentence-transformers", "feature-extraction", *objectives],
        eval_results=scores or None,
    )
    return ModelCard.from_template(
        header,
        str(TEMPLATE),
        name=name,
        languages=header.language,
        objectives=objectives,
        layers=layers,
        vectors=vectors,
        oldest=OLDEST.get(config.model_type, "4.0"),
        sources=checkpoint.manifest.get("sources", []),
        data=checkpoint.identity["data"],
        steps=f"{checkpoint.step:,}",
        init=init,
        init_licence=licence_of(init),
        settings=yaml.safe_dump(recipe, sort_keys=False),
        scores=scores,
        max_length=longest_sequence(config),
    )


def is_hub_name(init: str | None) -> bool:
    if not init or Path(init).exists():
        return False
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", init) is not None


def licence_of(init: str | None) -> str | None:
    """Return the licence that the card in the folder of model.init names, if there is one."""
    card = Path(init or "", CARD)
    if not init or not card.is_file():
        return None
    return ModelCard.load(card, ignore_metadata_errors=True).data.license


def eval_results(evaluation: Numbers) -> list[EvalResult]:
    """Return the finite numbers with a better direction as the header lists them. evaluation: {"results": {task: {row:
    {metric: number}}}, "intervals": the same with intervals}."""
    entries = []
    for task, rows in evaluation.get("results", {}).items():
        for row, numbers in rows.items():
            intervals = evaluation.get("intervals", {}).get(task, {}).get(row, {})
            for name, value in numbers.items():
                if not isinstance(value, int | float) or not math.isfinite(value) or not direction(name):
                    continue
                entry = EvalResult(
                    task_type=PIPELINES.get(task, "sentence-similarity"),
                    task_name=task,
                    dataset_type=f"{task}/{row}",
                    dataset_name=row,
                    metric_type=name,
                    metric_value=float(f"{value:.6g}"),
                )
                if name in intervals:
                    entry.metric_args = {"interval_95": [float(f"{bound:.6g}") for bound in intervals[name]]}
                entries.append(entry)
    return entries


def read_evaluation(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the line of the run's evals.jsonl for the checkpoint's step; {} if there is none."""
    path = checkpoint.path.parent.parent / "evals.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    evaluation: dict[str, Any] = {}
    for line in lines:
        if line.endswith("\n"):  # the last line may be cut off
            entry = json.loads(line)
            if entry["step"] == checkpoint.step:
                evaluation = entry
    return evaluation
