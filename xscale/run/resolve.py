"""Finds and checks the recipe and the corpus of a run, and builds the model with the weights of step 0."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from xscale.checkpoint import store as checkpoints
from xscale.checkpoint.restore import load_initial_model
from xscale.data.corpus import Corpus, convert_epochs_to_steps, open_corpus
from xscale.data.loader import Loader
from xscale.errors import UserError
from xscale.models.build import (
    build_initial_encoder,
    has_segment_embeddings,
    read_hidden_dropout_or_default,
    xscale_field_of_init,
)
from xscale.objectives import OBJECTIVES
from xscale.ranks import CpuGroup
from xscale.recipe import Recipe, load_recipe, shipped_recipe_names
from xscale.step import cost
from xscale.step.ds_config import EngineConfig
from xscale.step.module import StepModule


def resolve_run(
    recipe_name: str, sets: list[str], data: Sequence[Path | str], cpu_group: CpuGroup | None = None
) -> tuple[Recipe, Corpus]:
    """Return a run's recipe and the corpus that the run reads, both checked. The ranks of `cpu_group` share the check
    of the files. Raises UserError."""
    recipe = load_recipe(recipe_name, sets, OBJECTIVES)
    check_recipe_suits_starting_weights(recipe_name, recipe, sets)
    if recipe.model.dropout is None:
        dropout = read_hidden_dropout_or_default(resolve_init_to_hugging_face(recipe.model.init))
        recipe = load_recipe(recipe_name, [*sets, f"model.dropout={dropout}"], OBJECTIVES)
    if any(phase.model.dropout is None for phase in recipe.schedule.values):
        raise UserError(
            f"recipe {recipe_name}: model.dropout is null in a phase, but a phase must set a number. Write a number, "
            "or remove model.dropout from the phase"
        )
    init = resolve_init_to_hugging_face(recipe.model.init)
    corpus = open_corpus(
        recipe,
        OBJECTIVES,
        data,
        cpu_group,
        init=init,
        model_has_two_token_types=has_segment_embeddings(init, recipe.model.preset),
        withheld_before=xscale_field_of_init(init).get("lexicon_heldout", 1.0),
    )
    return convert_epochs_to_steps(recipe, corpus), corpus


def resolve_init_to_hugging_face(init: str | None) -> str | Path | None:
    """Return model.init, or if it is a run or a checkpoint, the Hugging Face folder in the checkpoint."""
    if init and checkpoints.is_run_or_checkpoint(Path(init)):
        return checkpoints.resolve_checkpoint(Path(init)) / checkpoints.HF
    return init


def check_recipe_suits_starting_weights(recipe_name: str, recipe: Recipe, sets: list[str]) -> None:
    """Raise UserError if the recipe suits other weights than those that the run starts from (model.starts_from). A user
    who gives train.lr, or model.init=null, by --set gets no error."""
    init = recipe.model.init
    fields_set = {assignment.partition("=")[0] for assignment in sets}
    if recipe.model.starts_from == "model" and init is None and "model.init" not in fields_set:
        raise UserError(
            f"recipe {recipe_name} is for a pre-trained model, and model.init is null. Choose a model by --set "
            "model.init=DIR_OR_NAME"
        )
    if recipe.model.starts_from != "scratch" or init is None or "train.lr" in fields_set:
        return
    if xscale_field_of_init(resolve_init_to_hugging_face(init)):
        return  # trained by xscale
    adapt_recipe = f"adapt/{recipe_name}"
    if adapt_recipe not in shipped_recipe_names():
        adapt_recipe = "adapt/NAME"
    raise UserError(
        f"recipe {recipe_name} is for random weights: its learning rate, train.lr {recipe.train.lr:g}, would harm "
        f"the pre-trained model.init {init}. Use a recipe for pre-trained models (--recipe {adapt_recipe}), or set a "
        "lower learning rate and the model's dropout (--set train.lr=5e-5 model.dropout=null)"
    )


def build_initial_module(recipe: Recipe, corpus: Corpus) -> StepModule:
    """Build the module of step 0."""
    return StepModule(build_initial_encoder(recipe, corpus, load_initial_model), recipe)


def fit_rows_into_gpu_memory(
    loader: Loader,
    module: StepModule,
    config: EngineConfig,
    gpu_bytes: int | None,
    cpu_group: CpuGroup,
    log: Callable[[str], None],
) -> Loader:
    """Return the loader with the default of train.max_tokens by the memory of the smallest GPU of the run, and log this
    default. Return the loader unchanged if the recipe has train.max_tokens or there is no GPU. gpu_bytes: the memory of
    this rank's GPU. All ranks call it together."""
    sizes = [size for size in cpu_group.all_gather(gpu_bytes) if size]
    if loader.recipe.train.max_tokens or not sizes:
        return loader
    world = config.resolved["train_batch_size"]
    tokens = cost.default_max_tokens(module, loader.recipe, config.resolved, config.precision, world, min(sizes))
    log(
        f"the run sets train.max_tokens to {tokens:,}, so that a step uses at most {cost.GPU_SHARE:.0%} of the "
        f"{min(sizes) / 2**30:.1f} GiB of GPU memory"
    )
    return replace(loader, gpu_tokens=tokens)
