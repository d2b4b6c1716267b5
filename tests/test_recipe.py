"""Recipes: strict, every problem at once, every message with the value and the remedy."""

import json
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml

from xscale.errors import UserError
from xscale.metric_keys import MetricKey, count_key
from xscale.models.build import PRESETS
from xscale.objectives import OBJECTIVES
from xscale.recipe import RECIPES, ModelConfig, Recipe, load_recipe, shipped_recipe_names
from xscale.run.run_status import identity_differences
from xscale.run.synchronizer import AgreedStep, check_step_has_targets

STREAM = "streams: {mlm: {objective: mlm, samples: 8}}\n"


def load(name: str, *sets: str) -> Recipe:
    return load_recipe(name, list(sets), OBJECTIVES)


@pytest.fixture
def recipe(tmp_path: Path):
    """recipe(text, "key=value", ...): a recipe of a file with this text."""

    def make(text: str, *sets: str) -> Recipe:
        (tmp_path / "r.yaml").write_text(text, encoding="utf-8")
        return load(str(tmp_path / "r.yaml"), *sets)

    return make


def problems(make: Any, *arguments: str) -> list[str]:
    with pytest.raises(UserError) as error:
        make(*arguments)
    return str(error.value).splitlines()[1:]


# 1. Shipped recipes


@pytest.mark.parametrize("name", shipped_recipe_names())
def test_shipped_recipes_load(name: str) -> None:
    recipe = load(name)
    written = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    assert list(recipe.streams) == list(written["streams"])
    resolved = recipe.to_dict()
    if len(recipe.streams) == 1:
        assert [*recipe.streams] == [stream.objective for stream in recipe.streams.values()]
    assert resolved.get("phases") == written.pop("phases", None)
    for section, fields in written.items():
        for key, value in fields.items():
            expected = value.items() if section == "streams" else [(None, value)]
            for field, wanted in expected:
                found = resolved[section][key][field] if field else resolved[section][key]
                assert found == wanted, (section, key, field)
    assert (RECIPES / f"{name}.yaml").read_text().startswith("#"), "a shipped recipe says what it is"


@pytest.mark.parametrize("name", shipped_recipe_names())
def test_the_resolved_recipe_loads_again(recipe, name: str) -> None:
    """config.yaml of a run is a recipe."""
    first = load(name, "train.lr=1e-5", "train.weight_decay=0")
    assert recipe(yaml.safe_dump(first.to_dict())) == first


def test_unknown_recipe() -> None:
    with pytest.raises(UserError, match=r"nonsense.*mixed.*mlm"):
        load("nonsense")
    with pytest.raises(UserError, match=r"absent\.yaml"):
        load("absent.yaml")


# 2. Types


@pytest.mark.parametrize("written", ["3e-4", "2.5e3", "1E-3", ".5e-1", "3"])
def test_a_number_with_an_exponent(recipe, written: str) -> None:
    """PyYAML reads it as text."""
    assert recipe(STREAM + f"train: {{lr: {written}}}").train.lr == float(written)


@pytest.mark.parametrize(("written", "number"), [("0100", 100), ("-010", -10), ("0o14", 12), ("0xff", 255)])
def test_whole_numbers_are_those_of_yaml_1_2(written: str, number: int) -> None:
    assert load("mlm", f"train.seed={written}").train.seed == number


@pytest.mark.parametrize("written", ["no", "off", "yes", "y"])
def test_languages_that_yaml_reads_as_truth_values(recipe, written: str) -> None:
    read = recipe(
        f"streams: {{mlm: {{objective: mlm, samples: 8, languages: [de, {written}, True]}}}}".replace(", True", "")
    )
    assert read.streams["mlm"].languages == ["de", written]


PATHS = ("model.init", "model.tokenizer", "data.cache")


@pytest.mark.parametrize(
    ("assignment", "shown"),
    [
        ("train.steps=true", "True"),
        ("train.steps=10.0", "10.0"),
        ("train.steps=null", "None"),
        ("train.lr=.nan", "nan"),
        ("train.precision=16", "16"),
        ("model.init=7", "7"),
        ("model.dropout='0.1'", "0.1"),
        ("data.lexicons=[1]", "1"),
        ("streams.mlm.languages=en", "en"),
        ("streams.mlm.whole_word=1", "1"),
        ("streams.mlm.objective=[mlm]", "mlm"),
        ("streams.mlm.objective=nonsense", "nonsense"),
        ("streams.mlm.objective=2020-01-01", "2020-01-01"),
        ("train.lr=2020-13-45", "'2020-13-45': the value must be a valid number"),
        ("train.lr=-1.0", "-1"),
        ("train.warmup=-1", "-1"),
        ("data.alpha=1.5", "1.5"),
        ("model.dropout=0.999999", "0.999999"),
        ("train.time_limit=0", "0"),
        ("train.time_limit=11:30:00", "'11:30:00': the value must be a number of minutes, such as 690"),
        ("train.steps=1:40", "'1:40'"),
        ("train.lr=1:30.5", "'1:30.5'"),
        ("checkpoint.keep=1", "1"),
        ("streams.mlm.samples=0", "0"),
        ("streams.mlm.mask_prob=1.0", "1"),
        ("streams.mlm.weight=1e308", "1e+308"),
        (
            "train.warmup=1.9",
            "1.9: the value must be a share of the run's steps, such as 0.1, or a whole number of steps",
        ),
        ("train.decay=1.1", "1.1: the value must be a share of the run's steps"),
        *((f"{field}=''", "the text must have at least 1 character") for field in PATHS),
        ("data.lexicons=['']", "data.lexicons[0]: '': the text must have at least 1 character"),
        ("phases={}", "{} is not a list"),
        ("phases=false", "False is not a list"),
    ],
)
def test_values_of_a_wrong_type_or_out_of_range(recipe, assignment: str, shown: str) -> None:
    (line,) = problems(recipe, STREAM, assignment)
    assert line.strip().startswith(assignment.partition("=")[0]) and shown in line


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("model: {init: None}", "model.init"),
        ("data: {cache: None}", "data.cache"),
        ("data: {languages: [en, None]}", "data.languages"),
        ("eval: {tasks: [{task: heldout, data: [None]}]}", "eval.tasks"),
        ("phases: [{until: 1.0, model.dropout: None}]", "phases[0].model.dropout"),
    ],
)
def test_the_none_of_python_is_not_a_value(recipe, text: str, name: str) -> None:
    """As text, it would be the name of a model or folder."""
    remedy = "None is not a value of YAML. Write null for no value, or remove None from a list"
    assert problems(recipe, f"{STREAM}{text}") == [f"  {name}: {remedy}"]
    assert problems(recipe, STREAM, "model.init=None") == [f"  model.init: {remedy}"]


def test_ints_are_floats_and_null_is_optional(recipe) -> None:
    made = recipe(STREAM + "train: {lr: 1, time_limit: 5}\nmodel: {init: null}\ndata:\n")
    assert made.train.lr == 1.0 and isinstance(made.train.lr, float) and isinstance(made.train.time_limit, float)
    assert made.model.init is None and made.data == load("mlm").data


@pytest.mark.parametrize(("given", "found"), [("auto", "auto"), ("0", 0), ("1024", 1024)])
def test_workers_are_a_number_or_auto(given: str, found: Any) -> None:
    assert load("mlm").data.workers == "auto" and load("mlm", f"data.workers={given}").data.workers == found


# 3. Structure


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (STREAM + "optimizer: {lr: 1.0}", "optimizer: unknown.*The .* are"),
        (STREAM + "train: {speed: 1.0}", "train.speed: unknown.*The .* are"),
        ("streams: {mlm: {objective: mlm, samples: 8, reset_positions: true}}", "streams.mlm.reset_positions: unknown"),
        ("streams: {mlm: {objective: mlm, samples: 8, options: {}}}", "streams.mlm.options: unknown"),
        ("train: {steps: 5}", "streams"),
        ("streams: {}", "streams"),
        ("streams: [mlm]", "streams"),
        ("streams: {mlm: 64}", "streams.mlm"),
        ("streams: {mlm: {samples: 8}}", "streams.mlm.objective"),
        ("streams: {mlm: {objective: mlm}}", "streams.mlm.samples: the value is missing"),
        ("streams: {mlm: {objective: mlm, samples: -1}}", "streams.mlm.samples: -1: "),
        (STREAM + "train: 5", "train"),
        (STREAM + "train: 0", "train"),
        (STREAM + "data: []", "data"),
    ],
)
def test_unknown_and_missing_parts(recipe, text: str, words: str) -> None:
    (line,) = problems(recipe, text)
    assert re.match(words, line.strip())


def test_every_preset_has_a_name_in_recipes() -> None:
    assert set(get_args(get_type_hints(ModelConfig)["preset"])) == set(PRESETS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", r"r\.yaml"),
        ("- 1", r"r\.yaml"),
        ("just text", r"r\.yaml"),
        ("\x00", r"r\.yaml"),
        ("\udcff\udcfe\x00", r"r\.yaml"),
        ("train: {steps: 5}\ntrain: {steps: 9}\n", "read as YAML .the key `train` occurs twice"),
        ("streams:\n  mlm: {objective: mlm, samples: 4, samples: 5}\n", "read as YAML .the key `samples` occurs twice"),
        (STREAM + "train: {steps: " + "9" * 5000 + "}", "read as YAML .*has 5,000 digits"),
        (STREAM + "train: {steps: " + "9" * 400 + "}", "has 400 digits. Write at most 300"),
        (STREAM + "a: " + "{a: " * 3000, "read as YAML ..*recursion"),
        *(
            (STREAM + f"train: {{lr: {value}}}", f"read as YAML .{words}")
            for value, words in (
                ("!!timestamp x", "the tag !!timestamp is not supported. Remove the tag"),
                ("!!bool x", "the tag !!bool is not supported"),
                ("!!binary aGVsbG8=", "the tag !!binary is not supported"),
                ("!!set {a, b}", "the tag !!set is not supported"),
                ("&a [*a]", "Circular reference"),
                ("0x" + "f" * 5000, ".*has 5,002 digits"),
                (r'"\uD800"', r"the text has an unpaired surrogate \('\\ud800'\)"),
            )
        ),
        (STREAM + "1: {a: 1}\n'1': {b: 1}", "read as YAML .the key `1` occurs twice"),
    ],
)
def test_a_file_that_is_no_recipe(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=words) as error:
        load(str(path))
    assert str(path) in str(error.value)


def test_all_problems_at_once(recipe) -> None:
    text = """
        modle: {}
        model: {preset: huge, dropout: no}
        streams:
          a: {objective: nonsense, samples: 1}
          b: {objective: tlm, sample: 1, languages: [no]}
        train: {lr: 3e-4, steps: true, speed: 1}
    """
    text = re.sub(r"^ {8}", "", text, flags=re.MULTILINE)
    found = problems(recipe, text, "data.alpha", "checkpoint.often=1")
    expected = ["modle", "model.preset", "model.dropout", "streams.a.objective", "streams.b.sample:"]
    expected += [
        "streams.b.samples: the value is missing",
        "train.steps",
        "train.speed",
        "--set data.alpha",
        "checkpoint.often",
    ]
    assert len(found) == len(expected)
    for name in expected:
        assert sum(line.strip().startswith(name) for line in found) == 1, (name, found)
    ranges = problems(recipe, STREAM, "train.lr=-1", "data.alpha=3", "streams.mlm.samples=0")
    assert len(ranges) == 3


# 4. --set


def test_set_overrides_and_adds() -> None:
    made = load(
        "mlm",
        "train.lr=3e-4",
        "train.steps=7",
        "model.tokenizer=some/where",
        "data.lexicons=[a/en-de.txt, b/en-fr.txt]",
        "streams.mlm.mask_prob=0.3",
        "streams.mlm.languages=[en, 'no']",
        "streams.extra.objective=tlm",
        "streams.extra.samples=4",
        "streams.extra.reset_positions=true",
        "train.time_limit=null",
    )
    assert made.train.lr == 3e-4 and made.train.steps == 7 and made.model.tokenizer == "some/where"
    assert made.data.lexicons == ["a/en-de.txt", "b/en-fr.txt"]
    assert made.streams["mlm"].options.mask_prob == 0.3 and made.streams["mlm"].languages == ["en", "no"]
    assert [*made.streams] == ["mlm", "extra"]
    assert made.streams["extra"].options.reset_positions is True and made.streams["extra"].samples == 4
    assert made.train.time_limit is None
    assert made.train.warmup == load("mlm").train.warmup


def test_the_last_set_counts() -> None:
    assert load("mlm", "train.steps=7", "train.steps=8").train.steps == 8
    assert load("mlm", "streams.mlm={objective: tlm, samples: 3}").streams["mlm"].objective == "tlm"


@pytest.mark.parametrize(
    ("assignment", "named"),
    [
        ("trian.steps=5", "trian"),
        ("streams.mlm.mask_probability=0.2", "streams.mlm.mask_probability"),
        ("train.steps", "--set train.steps"),
        ("train.steps=1e3", "train.steps"),
        ("train.steps.more=1", "--set train.steps.more=1"),
        ("train.lr=[1", "--set train.lr=[1"),
        ("train:lr=3", "train:lr: unknown field. The fields of a recipe are model, "),
        ("train.lr=fast", "train.lr"),
        ("model.init=", "--set model.init= has no value, perhaps because a shell variable is not set"),
        ("data.languages= ", "--set data.languages=  has no value"),
        ("model.init=None", "model.init: None is not a value of YAML. Write null for no value"),
    ],
)
def test_set_is_strict(assignment: str, named: str) -> None:
    (line,) = problems(load, "mlm", assignment)
    assert line.strip().startswith(named)


def test_an_error_says_that_flags_have_changed_the_recipe() -> None:
    """--steps and --seed change the recipe, too."""
    with pytest.raises(UserError) as error:
        load("mixed", "train.steps=7", "eval.tasks=[{name:heldout}]", "eval.every=5")
    first, *lines = str(error.value).splitlines()
    assert first.endswith("mixed.yaml, changed on the command line:")
    assert "  eval.tasks[0].name: the value is missing. Write a value" in lines
    assert "  eval.tasks[0].name:heldout: unknown field. Remove the field" in lines


# 5. Meaning


@pytest.mark.parametrize(("warmup", "steps"), [(0.1, 100), (0.25, 250), (0, 0), (1, 1), (50, 50)])
def test_warmup_is_a_share_or_a_number(warmup: float, steps: int) -> None:
    assert load("mlm", "train.steps=1000", f"train.warmup={warmup}").train.steps_of_share(warmup) == steps


@pytest.mark.parametrize(("warm_in", "factors"), [(0, [3, 3, 3]), (2, [1.5, 3, 3]), (0.3, [1, 2, 3]), (1, [3, 3, 3])])
def test_a_stream_s_factor_rises_to_its_weight(warm_in: float, factors: list[float]) -> None:
    """The first step already counts; a warm-in below 1 is a share of the 10 steps."""
    made = load("mlm", "train.steps=10", "streams.mlm.weight=3", f"streams.mlm.warm_in={warm_in}")
    assert [made.stream_weight("mlm", step) for step in range(3)] == pytest.approx(factors)


def test_identity_covers_what_decides_the_result() -> None:
    """A resume may change how a run is carried out, and nothing else."""
    base = load("xlm")
    free = {
        "train.steps=5",
        "train.max_tokens=2000",
        "train.time_limit=3",
        "data.workers=0",
        "data.cache=x",
        "model.tokenizer=x",
        "checkpoint.every=3",
        "checkpoint.keep=9",
    }
    fixed = {
        "train.lr=0.5",
        "train.seed=9",
        "train.z_loss=1e-4",
        "data.max_length=99",
        "data.first=50",
        "model.preset=mini",
        "streams.mlm.samples=7",
        "streams.tlm.mask_prob=0.5",
        "streams.tlm.languages=[en-xx]",
        "streams.more={objective: mlm, samples: 1}",
    }
    assert load("xlm", *free).identity() == base.identity()
    for assignment in fixed:
        assert load("xlm", assignment).identity() != base.identity(), assignment


def test_a_field_that_an_identity_lacks_has_its_default() -> None:
    """Another version of xscale saved it; and fields without a default or of unknown objectives count as they are."""
    saved = {"recipe": load("xlm").identity(), "data": []}
    older = json.loads(json.dumps(saved))
    del older["recipe"]["data"]["overlong"], older["recipe"]["streams"]["tlm"]["mask_prob"]
    assert identity_differences(older, saved) == identity_differences(saved, older) == []
    now = {"recipe": load("xlm", "data.overlong=truncate").identity(), "data": []}
    assert identity_differences(older, now) == ["recipe.data.overlong: was drop, is now truncate"]
    older["recipe"]["streams"]["tlm"]["objective"] = "gone"
    assert len(identity_differences(older, saved)) == 2


def test_a_step_without_targets_is_an_error() -> None:
    """Documents of 2,600 words a line gave steps with a loss of 0 and exit code 0."""
    recipe = load("mlm", "data.max_length=16")
    none = {count_key("mlm", "mlm"): 0, MetricKey("too_long", "mlm"): 64}
    batch: Any = None
    nothing = AgreedStep(batch, none, {}, samples=0, report_metrics=0, vector_counts_of_ranks={})
    with pytest.raises(
        UserError, match=r"step 7 has no tokens to predict. .*longer than data.max_length \(16 .* is 64.*truncate"
    ):
        check_step_has_targets(nothing, 7, recipe)
    with pytest.raises(UserError, match=r"step 7 has no tokens to predict. .* is 64. Set more samples"):
        check_step_has_targets(nothing, 7, load("mlm", "data.max_length=16", "data.overlong=truncate"))
    check_step_has_targets(nothing._replace(counts=none | {count_key("tlm", "mlm"): 1}), 7, recipe)


@pytest.mark.parametrize("assignment", ["train.steps=" + "9" * 5000, "train.lr=" + "[" * 3000, "train={lr: 1, lr: 2}"])
def test_set_that_python_stumbles_over(assignment: str) -> None:
    with pytest.raises(UserError, match=r"--set train.*(at most 300 digits|recursion|lr. occurs twice).*value in YAML"):
        load_recipe("mlm", [assignment], OBJECTIVES)


def test_a_recipe_s_name_that_no_file_can_have(tmp_path: Path) -> None:
    for name in ("x" * 5000, str(tmp_path.with_suffix(".yaml"))):
        tmp_path.with_suffix(".yaml").mkdir(exist_ok=True)
        with pytest.raises(UserError, match=r"recipe '.*' not found"):
            load_recipe(name, [], {})
