"""Flags, recipe fields and commands of xscale 0.1 with what to use instead, and Hugging Face's names of our fields.

An error names the substitute. What 0.1 had goes with 0.3. An entry is "key": "what to use instead".
"""

import fnmatch
import sys
from pathlib import Path

FLAGS: dict[str, str] = {
    "lexicon --lower": "lower-case the dictionary first by `sed 's/.*/\\L&/'`, or use --truecase",
    "tokenizer --coverage": "use a larger --vocab_size, which has room for more characters",
    "lexicon --intersect": "`grep -Fxf OTHER.txt en-de.txt` keeps the entries that both files have",
    "lexicon --tokenizer": "`xscale train --dry_run` prints how many entries of each dictionary have unknown tokens",
    "index --links_count": (
        "run `xscale data index DIR`; if the word alignments count words between spaces, then set `segmentation` in "
        'DIR/index.json to {"name": "whitespace"}, and run `xscale data index DIR` again'
    ),
    "lexicon --min_length": "remove short words from the file first, for example by `awk 'length($1) > 1'`",
    "report --watch": "`tensorboard --logdir runs` shows the curves of runs while they train",
    "report --png": "open the page in a browser, and save the pictures of the page, which are SVG files",
    "report --scores": "name the result files without a flag: `xscale report A.json B.json --out table.html`",
    "report --models": "to draw translated words by t-SNE, use benchmarks/papers/run.py in a checkout of xscale",
    "report --pairs": "to draw translated words by t-SNE, use benchmarks/papers/run.py in a checkout of xscale",
    "data_tools.inspect --html": "report.html of `xscale data prepare` shows each source's records and removed text",
    "--plugin": "name the objective in the recipe: streams.NAME.objective=MODULE:NAME",
    # One line for each flag.
    "eval.finetune --source": "write the source language as the first language of --train",
    "tokenizer --extend": "use tokenizer.add_tokens and model.resize_token_embeddings (docs/how-to/add-language.md)",
    "write_shards --symmetrize": "join the two directions of eflomal by `atools`, and pass the result by --links FILE",
    "--data_change": "use `--fork RUN@STEP --out NEW` with other --data; the fork reads RUN's data on from STEP",
    "--suite": "name each test set by the flags of its task: --data, --texts or --aer",
    "--parts": "start one job per task, each with its own --task and --out",
    "--part": "start one job per task, each with its own --task and --out",
    "--card": "write scores into the card of a model by `huggingface_hub.metadata_update`",
    "eval.run --lexicon_heldout": "remove the flag; the exported model stores the data.lexicon_heldout of its recipe",
    "eval.run --pairs": "all pairs with English are measured; if --texts has no English, all pairs are measured",
    "--mteb": "run `mteb run -m HF_DIR -t TASK`; exported models are models of sentence-transformers",
    "--mining": "use `paraphrase_mining` of sentence-transformers, or the task BUCC of mteb",
    "--mining_dev": "use the task BUCC of mteb, which chooses the threshold itself",
    "--xsim_plus": "use xsim.py of LASER on the vectors of `SentenceTransformer(HF_DIR).encode`",
    "--finetune": "use the command `xscale finetune`",
    "--onnx": "run `optimum-cli export onnx --model HF_DIR OUT` in an environment that has optimum-onnx",
    "eval.finetune --predictions": "xscale does not save predictions; the JSON file of --out has the scores",
    "eval.finetune --keep": "--out has the scores; to keep a model, fine-tune the model by the Trainer of transformers",
    "eval.finetune --ds_config": "use torchrun --nproc_per_node N without DeepSpeed; the model must fit into one GPU",
}
"""Flag, such as "--data_change" -> what to use instead. If another command keeps the flag, the key names the command:
"eval.run --suite"."""

FIELDS: dict[str, str] = {
    # One line for each field.
    "train.rollbacks": "remove the field; if the loss or gradient is not finite, skip the step by train.skip_steps",
    "train.spikes": "find spikes of the loss in TensorBoard, and skip their steps by train.skip_steps=[STEP, ...]",
    "train.compile": "remove the field; on a GPU, the encoder uses xscale's Triton kernels",
    "streams.*.tokens": "set samples, the number of samples per optimizer step over all ranks",
    "data.truecase": "use `xscale data lexicon --truecase DIR`; the dictionary of an old run is in RUN/lexicon/",
    "train.tracker": "use TensorBoard; for wandb, run `wandb sync RUN/tb` or wandb.init(sync_tensorboard=True)",
    "data.max_epochs": "--dry_run prints the epochs of each source; raise data.alpha if small languages have too many",
    "train.activation_checkpointing": "lower train.max_tokens; a forward pass then needs less memory",
    "model.rope_theta": "change rope_theta in config.json of an exported model, and set model.init to its folder",
    "train.stop_limit": "remove the field; a run that hangs ends after train.stall_limit minutes, with exit code 5",
    "checkpoint.background": "remove the field; training waits for each save; to wait less, raise checkpoint.every",
    "data.cache_gb": "remove the field; the disk of data.cache needs room for all shards that --data names by URL",
    "checkpoint.hook": "evaluate checkpoints in another job: slurm/evaluate_checkpoint.sh CHECKPOINT OUT.json ...",
}
"""Recipe field -> what to use instead. A * stands for a name that users choose: "streams.*.tokens"."""

HUGGING_FACE: dict[str, str] = {
    "batch_size": "streams.NAME.samples (per step over all ranks)",
    "bf16": "train.precision",
    "block_size": "data.max_length",
    "dataloader_num_workers": "data.workers",
    "dataset_name": "--data (after `xscale data prepare`)",
    "deepspeed": "--ds_config",
    "eval_steps": "eval.every",
    "fp16": "train.precision",
    "full_determinism": "train.deterministic",
    "gradient_accumulation_steps": "streams.NAME.samples (per step over all ranks) and train.max_tokens (for memory)",
    "gradient_checkpointing": "train.max_tokens",
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
    "per_device_train_batch_size": "streams.NAME.samples (per step over all ranks) and train.max_tokens (for memory)",
    "resume_from_checkpoint": "--resume",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "tokenizer_name": "model.tokenizer",
    "train_file": "--data (after `xscale data prepare`)",
    "warmup_ratio": "train.warmup",
    "warmup_steps": "train.warmup",
}
"""By the argument's name in Hugging Face's trainers and scripts. docs/how-to/from-hugging-face.md has more of them."""

CORPUS_KEYS: dict[str, str] = {
    # One line for each key.
    "zst": "write the names of the files: `text: [NAME.en.zst, NAME.de.zst]` and `links: NAME.aln.zst`",
    "opus": "unzip the file, and write the names of its two text files: `text: [NAME.en, NAME.de]`",
    "conllu": "write the output of `grep '^# text = ' FILE | cut -c10-` to a new file, and name this file by `text:`",
    "score": "remove lines with a low score from the file first, for example by awk",
    "boilerplate": "remove the boilerplate from the file first",
    "line_keys": "remove line_keys; each record's key always has the line number at which the pair or document begins",
}
"""By key of a source or of the rules in corpus.yaml: "opus"."""

COMMANDS: dict[str, str] = {
    "xscale.doctor": "`xscale train --dry_run` checks recipe and data; `ds_report` checks the machine",
    "xscale.merge": "export the models by `xscale export`, and merge the exported models by mergekit",
    # One line for each command.
    "data_tools.align": "use `xscale data write_shards pairs --align`, or `align: true` in corpus.yaml",
    "data_tools.derive": "use `python benchmarks/papers/derive.py` in a checkout, with the same flags",
    "xscale.eval.compare": "use `xscale report A.json B.json --out table.html`",
}
"""Module of a removed command, such as "xscale.doctor" -> what to use instead."""


def message_if_removed_flag(word: str) -> str:
    """Return the error about a word of the command line that is a removed flag, such as --data_change=append, or ""."""
    flag = word.partition("=")[0]
    program = ".".join(Path(sys.argv[0]).with_suffix("").parts)
    for key, substitute in FLAGS.items():
        command, _, name = key.rpartition(" ")
        if name == flag and program.removesuffix(".__main__").endswith(command):
            return f"{flag} is no longer part of xscale: {substitute}"
    return ""


def message_if_removed_or_hugging_face_field(name: str) -> str:
    """Return the error about a field of a recipe that was removed or has another name here, such as streams.mlm.tokens,
    or ""."""
    for pattern, substitute in FIELDS.items():
        if fnmatch.fnmatchcase(name, pattern):
            return f"{name} is no longer part of xscale: {substitute}"
    last = name.rpartition(".")[2]
    if last in HUGGING_FACE:
        return f"{name}: unknown field. Instead of Hugging Face's {last}, xscale has {HUGGING_FACE[last]}"
    return ""


def message_if_removed_corpus_key_or_command(name: str) -> str:
    """Return the error about a removed key of corpus.yaml, such as opus, or the module of a removed command, such as
    xscale.doctor, or ""."""
    substitute = CORPUS_KEYS.get(name) or COMMANDS.get(name)
    return f"{name} is no longer part of xscale: {substitute}" if substitute else ""
