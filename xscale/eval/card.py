"""Makes the model card of an export, README.md, from the template card.md."""

from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from xscale import files
from xscale.checkpoint.store import Checkpoint
from xscale.eval.sentence_files import SentenceVectors
from xscale.models.build import longest_sequence

CARD = "README.md"
TEMPLATE = Path(__file__).with_name("card.md")
OLDEST = {"modernbert": "4.48"}
"""{type of a model: the oldest version of transformers that has the type}. Other types are in version 4.0."""


def checkpoint_card(
    checkpoint: Checkpoint, config: Any, name: str, vectors: SentenceVectors, layers: int | None = None
) -> ModelCard:
    """Return the card of an exported checkpoint. config: the model's configuration. name: the export's name. layers:
    the number of first layers in the export; None: all."""
    recipe = checkpoint.identity["recipe"]
    init = recipe["model"]["init"]
    is_on_hub = init and not Path(init).exists() and files.may_exist(init)
    objectives = sorted({stream["objective"] for stream in recipe["streams"].values()})
    header = ModelCardData(
        language=config.xscale["languages"][1:],
        license="unknown",
        library_name="transformers",
        pipeline_tag="feature-extraction" if layers else "fill-mask",
        base_model=init if is_on_hub else None,
        model_name=name,
        tags=["xscale", "sentence-transformers", "feature-extraction", *objectives],
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
        sources=checkpoint.sources,
        data=checkpoint.identity["data"],
        steps=f"{checkpoint.step:,}",
        init=init,
        settings=yaml.safe_dump(recipe, sort_keys=False),
        max_length=longest_sequence(config),
    )
