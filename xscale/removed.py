"""Flags, recipe fields and commands of xscale 0.1 with what to use instead, and Hugging Face's names of our fields.

An error names the substitute. What 0.1 had goes with 0.3. An entry stands on one line: "key": "what to use instead".
"""

import fnmatch
import sys
from pathlib import Path

FLAGS: dict[str, str] = {
    "lexicon --lower": "lower-case the file first: `tr '[:upper:]' '[:lower:]'`; or use --truecase",
    "tokenizer --coverage": "a larger --vocab_size has more characters",
    "lexicon --intersect": "`grep -Fxf OTHER.txt en-de.txt` keeps the entries that both files have",
    "lexicon --tokenizer": "`xscale train --dry_run` says how many entries have unknown tokens",
    "index --links_count": "set index.json's segmentation to {'name': 'whitespace'} before `xscale data index` runs",
    "lexicon --min_length": "filter the file first, as by awk 'length($1) > 1'",
    "report --watch": "`tensorboard --logdir runs` has live curves",
    "report --png": "the pictures of the page are SVG; save them from a browser",
    "report --scores": "give result files like runs: `xscale report A.json B.json --out table.html`",
    "report --models": "benchmarks/papers/run.py draws translated words by t-SNE",
    "report --pairs": "benchmarks/papers/run.py draws translated words by t-SNE",
    "data_tools.inspect --html": "prepare's report.html has the counts and the removed text of each source",
    "--plugin": "name an objective of your own in the recipe: streams.NAME.objective=MODULE:NAME",
    # One line for each flag.
    "eval.finetune --source": "the first language of --train is the source language",
    "tokenizer --extend": "tokenizer.add_tokens and model.resize_token_embeddings (docs/how-to/add-language.md)",
    "write_shards --symmetrize": "run eflomal yourself, and give its links to --links, --links_src and --links_tgt",
    "--data_change": "`--fork RUN@STEP --out NEW` takes further --data, and the old data continue where they were",
    "--suite": "give each test set to --task by its own flags",
    "--parts": "give each job its own --task and --out",
    "--part": "give each job its own --task and --out",
    "--card": "`huggingface_hub.metadata_update` adds scores to a model's card",
    "eval.run --pairs": "pairs with English are measured; of a folder of --texts without English, all pairs",
    "--mteb": "an export is a sentence-transformers model: `mteb run -m HF_DIR -t TASK`",
    "--mining": "sentence-transformers' `paraphrase_mining`, or mteb's BUCC task",
    "--mining_dev": "mteb's BUCC task sets its own threshold",
    "--xsim_plus": "LASER's xsim.py reads vectors of `SentenceTransformer(HF_DIR).encode`",
    "--finetune": "`xscale finetune` is a command of its own",
    "--onnx": "`optimum-cli export onnx --model HF_DIR OUT`, in an environment that has optimum-onnx",
    "eval.finetune --predictions": "the JSON of --out has all scores",
    "eval.finetune --keep": "fine-tune by transformers' Trainer what you want to use; --out has the scores",
    "eval.finetune --ds_config": "start it by torchrun --nproc_per_node N; an encoder and its head fit one GPU",
}
"""Flag, such as "--data_change" -> what to use instead. If another command keeps the flag, the key names the command:
"eval.run --suite"."""

FIELDS: dict[str, str] = {
    # One line for each field.
    "train.rollbacks": "a run that is not finite ends with exit code 3; start it again with train.skip_steps: [STEP]",
    "train.spikes": "look at the loss in TensorBoard, and leave steps out: train.skip_steps=[$(seq -s, 812 820)]",
    "train.compile": "leave it out; packed rows are not padded to one shape any more",
    "streams.*.tokens": "set samples, the number per optimizer step over all ranks",
    "data.truecase": "`xscale data lexicon --truecase DIR`; of older runs, data.lexicons=[RUN/lexicon/FILE.txt]",
    "train.tracker": "TensorBoard; for wandb, `wandb sync RUN/tb` or wandb.init(sync_tensorboard=True)",
    "data.max_epochs": "--dry_run prints the epochs; a larger data.alpha, or a phase's data.languages, lowers them",
    "train.stop_limit": "leave it out; a run that hangs ends after train.stall_limit, with exit code 5",
    "checkpoint.background": "leave it out; training waits for each save, so a larger checkpoint.every waits less",
    "data.cache_gb": "leave it out; data.cache needs a disk with room for all shards at URLs",
    "checkpoint.hook": "a second job: slurm/evaluate_checkpoint.sh CHECKPOINT OUT.json --task ...",
}
"""Recipe field -> what to use instead. A * stands for a name that users choose: "streams.*.tokens"."""

HUGGING_FACE: dict[str, str] = {
    "batch_size": "streams.NAME.samples, of a step over all ranks",
    "bf16": "train.precision",
    "block_size": "data.max_length",
    "dataloader_num_workers": "data.workers",
    "dataset_name": "--data, after `xscale data prepare`",
    "deepspeed": "--ds_config",
    "eval_steps": "eval.every",
    "fp16": "train.precision",
    "full_determinism": "train.deterministic",
    "gradient_accumulation_steps": "streams.NAME.samples, of a step over all ranks, and train.max_tokens for memory",
    "gradient_checkpointing": "train.activation_checkpointing",
    "label_smoothing_factor": "train.label_smoothing",
    "learning_rate": "train.lr",
    "load_best_model_at_end": "checkpoint.best",
    "lr_scheduler_type": "train.schedule",
    "max_seq_length": "data.max_length",
    "max_steps": "train.steps",
    "max_train_samples": "data.first",
    "metric_for_best_model": "checkpoint.best",
    "mlm_probability": "streams.NAME.mask_prob",
    "model_name_or_path": "model.init",
    "num_train_epochs": "train.epochs",
    "output_dir": "--out",
    "per_device_train_batch_size": "streams.NAME.samples, of a step over all ranks, and train.max_tokens for memory",
    "resume_from_checkpoint": "--resume",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "tokenizer_name": "model.tokenizer",
    "train_file": "--data, after `xscale data prepare`",
    "warmup_ratio": "train.warmup",
    "warmup_steps": "train.warmup",
}
"""By the argument's name in Hugging Face's trainers and scripts. docs/how-to/from-hugging-face.md has more of them."""

CORPUS_KEYS: dict[str, str] = {
    # One line for each key.
    "zst": "text: [F.en.zst, F.de.zst], with links: F.aln.zst",
    "opus": "unzip the file, and give text: [F.en, F.de]",
    "conllu": "`grep '^# text = ' F | cut -c10-`, and give the result as text",
    "score": "filter the lines by their scores before, such as by awk",
    "boilerplate": "remove such lines before",
    "line_keys": "leave it out; the key of a record of text says the line at which its pair or document begins",
}
"""By key of a source or of the rules in corpus.yaml: "opus"."""

COMMANDS: dict[str, str] = {
    "xscale.doctor": "`xscale train --dry_run` checks the recipe, the data and the disk, and ds_report the machine",
    "xscale.merge": "export the models, and merge the exports by mergekit",
    # One line for each command.
    "data_tools.align": "`xscale data write_shards pairs --align`, or align: true in corpus.yaml",
    "data_tools.derive": "`python benchmarks/papers/derive.py` of a checkout has the same flags",
    "xscale.eval.compare": "`xscale report A.json B.json --out table.html`",
}
"""Module of a removed command, such as "xscale.doctor" -> what to use instead."""


def removed_flag(word: str) -> str:
    """Return the error about a word of the command line that is a removed flag, such as --data_change=append, or ""."""
    flag = word.partition("=")[0]
    program = ".".join(Path(sys.argv[0]).with_suffix("").parts)
    for key, substitute in FLAGS.items():
        command, _, name = key.rpartition(" ")
        if name == flag and program.removesuffix(".__main__").endswith(command):
            return f"{flag} is no longer part of xscale: {substitute}"
    return ""


def removed_field(name: str) -> str:
    """Return the error about a field of a recipe that was removed or has another name here, such as streams.mlm.tokens,
    or ""."""
    for pattern, substitute in FIELDS.items():
        if fnmatch.fnmatchcase(name, pattern):
            return f"{name} is no longer part of xscale: {substitute}"
    last = name.rpartition(".")[2]
    if last in HUGGING_FACE:
        return f"{name}: unknown key; what Hugging Face calls {last} is {HUGGING_FACE[last]} here"
    return ""


def removed_name(name: str) -> str:
    """Return the error about a removed key of corpus.yaml, such as opus, or the module of a removed command, such as
    xscale.doctor, or ""."""
    for table in (CORPUS_KEYS, COMMANDS):
        if name in table:
            return f"{name} is no longer part of xscale: {table[name]}"
    return ""
