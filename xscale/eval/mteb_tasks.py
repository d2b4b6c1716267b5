"""Evaluates an exported encoder's sentence vectors on tasks of mteb (Muennighoff et al. 2023), with local data.

mteb reads a task's folder like the data set on the hub: the folder is a clone (`git clone
https://huggingface.co/datasets/mteb/xnli`), or has the same files. Scores are mteb's own. A results row has mteb's name
and type of the task: "XNLI PairClassification" compares cosines of sentence pairs, unlike fine-tuning on XNLI.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xscale import files
from xscale.errors import UserError
from xscale.eval.model import ExportedModel, Scores
from xscale.eval.retrieval import BATCH, Variant, embed


class MtebEncoder:
    """An encoder for mteb (its EncoderProtocol): `mteb.evaluate(MtebEncoder(ExportedModel(path)), tasks)`."""

    def __init__(self, model: ExportedModel, pooling: str | None = None, layer: int = -1):
        self.model, self.pooling, self.layer = model, pooling or model.pooling, layer

    def encode(
        self, inputs: Iterable[Mapping[str, Any]], *, task_metadata: Any, hf_split: str, hf_subset: str, **others: Any
    ) -> np.ndarray:
        """Return unit vectors [texts, H]. The language embedding is neutral unless hf_subset is a language's name."""
        texts = [text for batch in inputs for text in batch["text"]]
        language_id = self.model.language_ids([hf_subset])[hf_subset]
        (vectors,) = embed(self.model, texts, language_id, [(self.pooling, self.layer)]).values()
        return vectors.cpu().numpy()

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Return the cosine [n, m] of each of the n vectors with each of the m vectors."""
        return as_rows(embeddings1) @ as_rows(embeddings2).T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Return the cosines [n] of the vectors i of both arrays."""
        return (as_rows(embeddings1) * as_rows(embeddings2)).sum(1)

    @property
    def mteb_model_meta(self) -> Any:
        """Return the name and revision (hash of the weights, pooling, layer) under which mteb caches results."""
        from mteb.models import ModelMeta

        weights = [files.sha256_file(path) for path in sorted(self.model.path.glob("*.safetensors"))]
        revision = "-".join([*(digest[:12] for digest in weights), self.pooling, f"layer{self.layer}"])
        return ModelMeta.create_empty({"name": f"xscale/{self.model.path.resolve().name}", "revision": revision})


def as_rows(vectors: Any) -> Tensor:
    """Return the vectors as a tensor [n, H]; a single vector becomes [1, H]."""
    return torch.atleast_2d(torch.as_tensor(vectors))


def find_task(name: str, folder: Path, subsets: Sequence[str]) -> Any:
    """Return mteb's task, set to read the folder's data. subsets: those to evaluate; []: all. Raises UserError."""
    try:
        import mteb
    except ImportError:
        raise UserError("mteb is not installed; `pip install 'xscale[mteb]'` brings it") from None
    if not folder.is_dir():
        raise UserError(
            f"--mteb {name} {folder}: {folder} is not a folder; download the data set that mteb names for {name}"
        )
    try:
        task = mteb.get_task(name, hf_subsets=subsets or None)
    except (KeyError, ValueError) as error:
        raise UserError(f"--mteb {' '.join([name, str(folder), *subsets])}: {error}") from None
    absent = sorted(set(subsets) - set(task.hf_subsets))
    if absent:
        raise UserError(f"--mteb {name}: the task has no subset {', '.join(absent)}; choose others")
    task.metadata = task.metadata.model_copy(update={"dataset": {"path": str(folder.resolve())}})
    return task


def evaluate(model: ExportedModel, task: Any, variants: Sequence[Variant]) -> dict[str, Scores]:
    """Return {results row: mteb's scores}, with a row for each subset, split (if several) and variant."""
    try:
        task.load_data()
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{task.metadata.dataset['path']} is not the data of mteb's {task.metadata.name}: {error}"
        ) from None
    results = {}
    for split, variant in product(task.eval_splits, variants):
        encoder = MtebEncoder(model, *variant.vectors)
        for subset, scores in task.evaluate(encoder, split, encode_kwargs={"batch_size": BATCH}).items():
            name = [subset, split if len(task.eval_splits) > 1 else "", variant.name]
            numeric = {metric: float(v) for metric, v in scores.items() if isinstance(v, int | float)}
            results[" ".join(filter(None, name))] = {"main_score": numeric["main_score"]} | numeric
    return results
