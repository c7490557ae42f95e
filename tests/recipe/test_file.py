from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from each_case import check_each
from wfm_ds.errors import RecipeError
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.algorithms import DecaySchedule, NftAlgorithm, SftAlgorithm
from wfm_ds.recipe.schema import Recipe, list_unread_keys
from wfm_ds.recipe.sections import LoraRecipe, RewardFunction

GOOD = """\
run: {output_dir: out, steps: 3}
model:
  path: tiny:sd3
data: {kind: prompts, path: prompts}
sampling: {height: 64, width: 64}
algorithm:
  name: diffusion_nft
rollout: {group_size: 4}
reward:
  functions:
    - name: ocr
    - {name: sharp, weight: 2}
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Return `load(text, *overrides, base=...)`, which reads recipes/mine.yaml (and base.yaml) in an empty folder."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "recipes"
    folder.mkdir()

    def load_text(text, *overrides, base=None):
        (folder / "mine.yaml").write_text(text, encoding="utf-8")
        if base is not None:
            (folder / "base.yaml").write_text(base)
        return recipe_file.load_recipe(folder.relative_to(tmp_path) / "mine.yaml", overrides)

    return load_text


@pytest.fixture
def errors(load):
    """Return a function that gives the lines of the error raised by `load`."""

    def lines(*args, **kwargs):
        with pytest.raises(RecipeError) as caught:
            load(*args, **kwargs)
        return str(caught.value).split("\n")

    return lines


def with_algorithm(*lines):
    return GOOD.replace("name: diffusion_nft", "\n  ".join(["name: diffusion_nft", *lines]))


# ---- reading


def test_a_good_recipe_has_its_values_and_the_defaults(load):
    recipe = load(GOOD)
    assert recipe.algorithm == NftAlgorithm(name="diffusion_nft")
    assert recipe.reward.functions == [RewardFunction(name="ocr"), RewardFunction(name="sharp", weight=2)]
    assert recipe.lora is None


@check_each(
    ("override", "value"),
    [
        *(("optimizer.lr=1e-4", 1e-4), ("optimizer.lr=3E-4", 3e-4), ("optimizer.lr=1e5", 1e5), ("optimizer.lr=2", 2.0)),
        *(("optimizer.lr=.5", 0.5), ("run.steps=1e3", 1000), ("data.shuffle=no", False)),
        ("sampling.guidance_scale=&a 3", 3.0),
        ("reward.functions.0.options={mode: on}", {"mode": "on"}),  # text where no flag is expected
    ],
)
def test_scalars_are_those_of_yaml_1_2(load, override, value):
    found = load(GOOD, override)
    for part in override.partition("=")[0].split("."):
        found = found[int(part)] if part.isdecimal() else getattr(found, part)
    assert found == value


def test_anchors_and_empty_sections_may_be_used(load):
    recipe = load(GOOD.replace("height: 64, width: 64", "height: &side 96, width: *side"))
    assert (recipe.sampling.height, recipe.sampling.width) == (96, 96)
    assert load(GOOD + "validation:\nlora:\n") == load(GOOD)


# ---- errors in one file


@check_each(
    ("old", "new", "line", "message"),
    [
        (", steps: 3", "", 1, "the key run.steps is missing; expected a whole number > 0"),
        ("sampling: {height: 64, width: 64}", "sampling:", 5, "the section sampling is missing; it needs height and"),
        ("rollout:", "rolout:", 8, "rolout is not a section; did you mean rollout?"),
        ("group_size: 4", "group_size: 0", 8, "rollout.group_size: expected a whole number > 0, got 0"),
        ("group_size: 4", "group_size: 1", 8, "rollout.group_size 1: advantages compare the samples of a prompt"),
        ("group_size: 4", "lr: 1", 8, "rollout.lr is not a key of rollout; lr is a key of optimizer"),
        ("path: tiny:sd3", "path: 3.5", 3, "model.path: expected text, got 3.5; put it in quotes"),
        ("path: tiny:sd3", "path: [a]", 3, "model.path: expected text, got ['a']"),
        (
            "name: diffusion_nft",
            "name: grpo",
            7,
            "algorithm.name: expected one of sft, dpo, diffusion_nft, awm, ram, dgpo, flow_grpo, ddrl, opd, dmd2, "
            "vlm_sft, package.module:Class, got 'grpo'",
        ),
        ("name: diffusion_nft", "beta: 1", 6, "the key algorithm.name is missing; expected one of sft, dpo"),
        (
            "algorithm:\n  name: diffusion_nft",
            "algorithm: nft",
            6,
            "algorithm: expected a mapping with name: sft or dpo or diffusion_nft or awm or ram or dgpo or "
            "flow_grpo or ddrl or opd or dmd2 or vlm_sft, got 'nft'",
        ),
        ("name: diffusion_nft", "name: sft\n  sft: 1", 8, "algorithm.sft is not a key of sft"),
        ("steps: 3", "steps: 1.5", 1, "run.steps: expected a whole number > 0, got 1.5"),
        ("weight: 2", "weight: x", 12, "reward.functions.1.weight: expected a number, got 'x'"),
        ("weight: 2", "clip: [2, 1]", 12, "reward.functions.1.clip: the lower bound 2.0 must be below the upper"),
        ("weight: 2", "clip: [2]", 12, "reward.functions.1.clip: expected a list of 2, each a number, got [2]"),
        ("weight: 2", "weight: .nan", 12, "nan is not allowed"),
        ("name: ocr", "name: sharp", 9, "reward: each reward may be listed only once"),
        ("rollout: {group_size: 4}\n", "", 6, "algorithm diffusion_nft needs the section rollout"),
        ("kind: prompts", "kind: paired", 4, "algorithm diffusion_nft uses data.kind: paired only for"),
    ],
)
def test_errors_name_line_key_and_expectation(errors, old, new, line, message):
    assert old in GOOD
    found = errors(GOOD.replace(old, new))
    assert any(text.startswith(f"recipes/mine.yaml:{line}: {message}") for text in found), found


@check_each(
    ("algorithm", "overrides", "lines"),
    [
        (
            ["timestep_fracton: .5"],
            (),
            [":8: {}timestep_fracton is not a key of diffusion_nft; did you mean timestep_fraction?"],
        ),
        (
            ["beta: 0", "kl_beta: true"],
            ("run.steps=many", "lora.rank='30'", "model.dtype=no"),
            [
                ":8: {}beta: expected a number > 0, got 0",
                ":9: {}kl_beta: expected a number >= 0, got true",
                "override lora.rank='30': lora.rank: expected a whole number > 0 and <= 65536, got '30'",
                "override model.dtype=no: model.dtype: expected one of bfloat16, float32, got 'no'",
                "override run.steps=many: run.steps: expected a whole number > 0, got 'many'",
            ],
        ),
        # A union reports the member that was meant.
        (
            ["old_decay: fast"],
            (),
            [
                ":8: {}old_decay: expected one of copy, standard, slow or a mapping with keys of flat_steps, initial, "
                "slope, max, got 'fast'"
            ],
        ),
        (
            ["old_decay:", "  slop: 1", "  max: 2"],
            (),
            [
                ":9: {}old_decay.slop is not a key of algorithm.old_decay; did you mean slope?",
                ":10: {}old_decay.max: expected a number >= 0 and < 1, got 2",
            ],
        ),
        (["old_decay: {initial: 0.6}"], (), [":8: {}old_decay: initial 0.6 is above max 0.5: raise max"]),
    ],
)
def test_all_errors_are_reported_in_order(errors, algorithm, overrides, lines):
    expected = [f"recipes/mine.yaml{line}" if line.startswith(":") else line for line in lines]
    assert errors(with_algorithm(*algorithm), *overrides) == [line.replace("{}", "algorithm.") for line in expected]


@check_each(
    ("text", "message"),
    [
        ("", ":1: the file is empty"),
        ("# nothing\n", ":1: the file is empty"),
        ("- a\n", ":1: expected a mapping of sections (run, model, data, sampling, algorithm, ...), got a list"),
        ("run:\n\tsteps: 3\n", ":2: this is not YAML: while scanning for the next token, found character '\\t'"),
        ("run: {a: 1\n", ":2: this is not YAML"),
        ("run: 1\n---\nrun: 2\n", ":2: this is not YAML"),
        ("run:\n  steps: \x01\n", ":2: this is not YAML: it contains a control character"),
        ("run:\n  a: 1\n  a: 2\n", ":3: duplicate key run.a; first at recipes/mine.yaml:2"),
        ("run: *a\n", ":1: this is not YAML: found undefined alias 'a'"),
        ("run: &a\n  b: *a\n", ":1: an alias contains itself"),
        ("run: !!python/object:os.x {}\n", ":1: the YAML type tag:yaml.org,2002:python/object:os.x"),
        ("run: !!int x\n", ":1: 'x' is not of the YAML type int"),
        ("1: a\n", ":1: a key must be text, got 1"),
        ("run: [" + "1, " * 700_000 + "]", ": a recipe has at most 1,048,576 characters"),
        ("run: " + "[" * 5000 + "]" * 5000, ": nested too deeply"),
        ("{" * 5000, ": nested too deeply"),
        (f"defaults: {'a' * 100_000}\n{GOOD}", ":1: defaults: file recipes/aaa"),
        (f"defaults: {'a/' * 50_000}\n{GOOD}", ":1: defaults: file recipes/a/a"),
    ],
)
def test_files_that_are_not_recipes_are_refused_with_the_line(errors, text, message):
    line = errors(text)[0]
    assert line.startswith("recipes/mine.yaml" + message)
    assert len(line) < 1000


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    messages = {"none.yaml": "recipe file not found", ".": "is a folder", "bytes.yaml": "not a UTF-8 text file"}
    for name, message in messages.items():
        with pytest.raises(RecipeError, match=message):
            recipe_file.load_recipe(tmp_path / name)
    with pytest.raises(RecipeError, match="at most 1,048,576 characters"):
        recipe_file.load_recipe(Path("/dev/zero"))


def test_many_problems_are_cut_short(errors):
    lines = errors(GOOD + "".join(f"k{i}: 1\n" for i in range(300)))
    assert len(lines) == 41
    assert lines[-1] == "and 260 more problems: fix these first"


# ---- defaults


def test_a_variant_merges_mappings_and_replaces_lists(load):
    recipe = load(
        "defaults: base.yaml\nrun: {steps: 7}\nreward: {functions: [{name: ocr}]}\nalgorithm: {beta: 2}\n",
        base=with_algorithm("kl_beta: 3"),
    )
    assert (recipe.run.output_dir.name, recipe.run.steps) == ("out", 7)
    assert recipe.algorithm == NftAlgorithm(name="diffusion_nft", beta=2, kl_beta=3)
    assert [f.name for f in recipe.reward.functions] == ["ocr"]


def test_null_in_a_variant_removes_a_section(load):
    base = GOOD + "lora: {rank: 3}\nvalidation: {every: 9}\n"
    assert load("defaults: base.yaml\n", base=base).lora == LoraRecipe(rank=3)
    recipe = load("defaults: base.yaml\nlora: null\nvalidation: null\n", base=base)
    assert recipe.lora is None
    assert recipe.validation.every == 0


def test_another_algorithm_drops_the_keys_of_the_base(load):
    variant = "defaults: base.yaml\nalgorithm: {name: sft, logit_std: 2}\ndata: {kind: paired}\nrollout:\nreward:\n"
    assert load(variant, base=with_algorithm("beta: 7")).algorithm == SftAlgorithm(name="sft", logit_std=2)


def test_another_model_drops_the_revision_of_the_base(load):
    base = GOOD.replace("path: tiny:sd3", "path: a/b\n  revision: v1\n  dtype: float32")

    def model(text, *overrides):
        found = load(f"defaults: base.yaml\n{text}", *overrides, base=base).model
        return found.path, found.revision, found.dtype

    assert model("model: {path: c/d}") == ("c/d", None, "float32")
    assert model("model: {path: c/d, revision: v2}") == ("c/d", "v2", "float32")
    assert model("model: {path: a/b}") == ("a/b", "v1", "float32")
    assert model("", "model.path=/models/b") == ("/models/b", None, "float32")
    assert model("", "model.path=a/b") == ("a/b", "v1", "float32")
    for words in (["model.path=c/d", "model.revision=v2"], ["model.revision=v2", "model.path=c/d"]):
        assert model("", *words) == ("c/d", "v2", "float32")


def test_errors_name_the_file_that_they_are_in(errors):
    found = errors("defaults: base.yaml\nrun: {steps: 0}\n", base=GOOD + "lora: {rnk: 3}\n")
    assert found == [
        "recipes/base.yaml:13: lora.rnk is not a key of lora; did you mean rank?",
        "recipes/mine.yaml:2: run.steps: expected a whole number > 0, got 0",
    ]


def test_defaults_must_exist_and_cannot_be_nested(errors):
    missing = errors("defaults: base.yaml\n")[0]
    assert missing.startswith("recipes/mine.yaml:1: defaults: file recipes/base.yaml not found")
    assert errors("defaults: [a]\n")[0].startswith("recipes/mine.yaml:1: defaults: expected the path of one recipe")
    assert errors("defaults: base.yaml\n", base="# x\ndefaults: mine.yaml\n")[0].startswith("recipes/base.yaml:2: ")


# ---- overrides


def test_overrides_are_yaml_values_at_a_path(load):
    recipe = load(
        GOOD + "lora: {rank: 3}\n",
        *("lora=null", "validation.seeds=[1,2]", "reward.functions.0.weight=2", "optimizer.lr=1e-3"),
        *("algorithm.old_decay.slope=0.1", "sampling.negative_prompt=blurry, dark", "run.output_dir=a=b"),
    )
    assert recipe.lora is None
    assert recipe.validation.seeds == [1, 2]
    assert [f.weight for f in recipe.reward.functions] == [2, 2]
    assert recipe.optimizer.lr == 1e-3
    assert recipe.algorithm.old_decay == DecaySchedule(slope=0.1)
    assert recipe.sampling.negative_prompt == "blurry, dark"
    assert str(recipe.run.output_dir) == "a=b"


@pytest.mark.parametrize("turn", [1, -1])
def test_an_override_of_the_algorithm_drops_its_keys_in_any_order(load, turn):
    words = ["algorithm.name=sft", "algorithm.logit_std=2", "rollout=null", "reward=null", "data.kind=paired"][::turn]
    assert load(with_algorithm("beta: 7"), *words).algorithm == SftAlgorithm(name="sft", logit_std=2)


@check_each(
    ("word", "message"),
    [
        ("run.steps", "expected section.key=value"),
        ("=3", "expected section.key=value"),
        ("run..steps=3", "expected section.key=value"),
        ("run.steps=", "the value is missing"),
        ("validation.seeds=[1,", "the value is not YAML"),
        ("optimizer.lr=.nan", "nan is not allowed"),
        ("defaults=base.yaml", "defaults must be in a file"),
        ("--run.steps=3", "--run is not a section; did you mean run?"),
        ("reward.functions.2.weight=1", "reward.functions is a list with entries 0 to 1: there is no entry 2"),
        ("reward.functions.ocr.weight=1", "reward.functions is a list with entries 0 to 1: there is no entry ocr"),
        ("run.steps.x=1", "run.steps: expected a whole number > 0, got a mapping (x)"),
        ("model=null", "the section model is missing; it needs path"),
        ("algorithm.beta=x", "algorithm.beta: expected a number > 0, got 'x'"),
    ],
)
def test_a_bad_override_is_named(errors, word, message):
    [line] = errors(GOOD, word)
    assert line.startswith(f"override {word}: {message}")


# ---- writing

FIT = st.characters(codec="utf-8", exclude_characters="\0")
TEXT = st.text(FIT, min_size=1, max_size=12) | st.sampled_from(
    ["1e-4", "on", "null", "2024-01-01", "~", "0x1", ": a", "- b"]
)
OPTIONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(
    text=TEXT,
    options=st.dictionaries(TEXT, OPTIONS, max_size=3),
    lr=st.floats(min_value=1e-12, max_value=10),
    lora=st.none()
    | st.builds(
        LoraRecipe, alpha=st.floats(min_value=0.1, allow_infinity=False), target_modules=st.none() | st.just(["q"])
    ),
    old_decay=st.sampled_from(["copy", "slow"]) | st.builds(DecaySchedule, slope=st.floats(min_value=0, max_value=1)),
    seeds=st.lists(st.integers(min_value=0, max_value=2**63 - 1), min_size=1, max_size=3),
)
def test_a_written_recipe_loads_to_the_same_values(tmp_path_factory, text, options, lr, lora, old_decay, seeds):
    values = yaml.safe_load(GOOD)
    values["reward"]["functions"][0]["options"] = options
    values |= {"optimizer": {"lr": lr}, "lora": lora, "validation": {"seeds": seeds, "prompts": "p/q.txt"}}
    values["sampling"]["negative_prompt"] = text
    values["algorithm"]["old_decay"] = old_decay
    recipe = Recipe.model_validate(values)
    path = tmp_path_factory.getbasetemp() / "resolved.yaml"
    path.write_text(recipe_file.dump_recipe(recipe), encoding="utf-8")
    assert repr(recipe_file.load_recipe(path)) == repr(recipe)  # == would accept 1 for true


def test_the_written_recipe_has_plain_values_and_only_used_sections(load):
    text = recipe_file.dump_recipe(load(GOOD))
    values = yaml.safe_load(text)
    assert "lora" not in values
    assert values["run"] == {"output_dir": "out", "steps": 3, "seed": 0, "resume": "auto"}
    assert "betas: [0.9, 0.999]" in text


SFT = ["algorithm={name: sft}", "data.kind=paired", "rollout=null", "reward=null"]


@check_each(
    ("overrides", "said"),
    [
        (["run.steps=" + "[" * 5000], "nested too deeply"),
        (["run." + "s" * 100_000 + "=1"], "is not a key of run"),
        (["run.steps=" + "9" * 99], "expected a whole number > 0, at most 2**63 - 1"),
        (["run.steps=1e30"], "expected a whole number > 0, at most 2**63 - 1"),
        (["run.steps=.inf"], "expected a whole number > 0"),
        (["optimizer.lr=.inf"], "expected a number > 0 that is finite, got inf"),
        (["optimizer.lr=1e999"], "expected a number > 0 that is finite, got inf"),
        (["lora.alpha=.inf"], "expected a number > 0 that is finite, got inf"),
        (["reward.functions.0.weight=-.inf"], "expected a number that is finite, got -inf"),
        (["reward.clip=[0, .inf]"], "expected a number that is finite, got inf"),
        (["lora.alpha=.nan"], "nan is not allowed"),
        (["lora.rank=99999999999"], "expected a whole number > 0 and <= 65536"),
        (["reward.functions.0.workers=99999999999"], "expected a whole number >= 1 and <= 256"),
        (["data.workers=99999999999"], "expected a whole number >= 1 and <= 256"),
        (["rollout.spawn=99999999999"], "expected a whole number >= 0 and <= 256"),
        (["reward.functions.0.name=color/"], "expected NAME, NAME/LABEL or package.module:Class, got 'color/'"),
        (["reward.functions.0.name=/color"], "expected NAME, NAME/LABEL or package.module:Class"),
        (["reward.functions.0.name=''"], "expected NAME, NAME/LABEL or package.module:Class"),
        (["model.path=" + "a/" * 50_000], "a path has at most 3500 bytes"),
        (["model.path=" + "a" * 300], "a file or folder name has at most 255 bytes"),
        (["run.output_dir=" + "a/" * 50_000], "a path has at most"),
        (["data.path=" + "a" * 300], "a file or folder name has at most 255 bytes"),
        (["data.cache_dir=~nobody_of_this_name/x"], "this machine has no such user"),
        (["data.caption_dropout=0.2"], "does not read data.caption_dropout: remove it"),
        (["data.fps=8", "data.crop=random"], "does not read data.fps and data.crop: remove it"),
        (["data.buckets=auto"], "does not read data.buckets: remove it"),
        (["validation.holdout=0.5"], "does not read validation.holdout: remove it"),
        ([*SFT, "sampling.solver=flow_sde"], "does not read sampling.solver: remove it"),
        ([*SFT, "data.split=test"], "does not read data.split: remove it"),
        ([*SFT, "data.choose=reward_std"], "does not read data.choose: remove it"),
        (["data.choose_floor=0.2"], "choose_floor: only read with choose: reward_std; remove it"),
        (["data.choose_memory=0.2"], "choose_memory: only read with choose: reward_std; remove it"),
        (["data.choose=reward_std", "data.shuffle=false"], "shuffle: only read with choose: even"),
        (["data.choose=reward_std", "data.choose_floor=0"], "expected a number > 0 and <= 1, got 0"),
        (["data.choose=reward_std", "data.choose_memory=1"], "expected a number >= 0 and < 1, got 1"),
        (["data.choose=adaptive"], "expected one of even, reward_std, got 'adaptive'"),
        (["algorithm.best_of_n=6"], "algorithm.best_of_n 6 is more than rollout.group_size 4"),
        (["algorithm.combine=gdpo"], "set advantage_std: group"),
        (
            ["algorithm.combine=mean", "reward.scale=2"],
            "algorithm.combine: mean does not use the weighted sum that reward.clip and reward.scale act on: remove "
            "them, or set clip in reward.functions",
        ),
        *(
            (["engine.timeout_minutes=5", f"reward.{key}=300"], f"{key} 300 is not below engine.timeout_minutes 5")
            for key in ("timeout_s", "start_timeout_s")
        ),
    ],
)
def test_values_that_are_impossible_or_do_not_fit_are_refused(errors, overrides, said):
    lines = errors(GOOD, *overrides)
    assert any(said in line for line in lines)
    assert len(lines) == 1 or not said.startswith("expected")
    assert max(map(len, lines)) < 1000


def test_the_ends_of_ranges_are_allowed(load):
    recipe = load(GOOD, "data.choose=reward_std", "data.choose_floor=1", "data.choose_memory=0")
    assert recipe.data.choose == "reward_std"
    assert load(GOOD, "engine.timeout_minutes=5", "reward.timeout_s=299").reward.timeout_s == 299


GRPO = ["algorithm={name: flow_grpo}", "sampling.solver=flow_sde"]
SERVICE = ["reward.spawn=false", "reward.endpoint=pipes.json"]


@check_each(
    ("overrides", "named", "reader"),
    [
        ([*SFT, "algorithm.mode_scale=1"], "mode_scale", ["algorithm.timestep_density=mode"]),
        (
            [*SFT, "algorithm.timestep_density=uniform", "algorithm.logit_std=2"],
            "logit_std",
            ["algorithm.timestep_density=logit_normal"],
        ),
        ([*GRPO, "algorithm.guard_reweight=false"], "guard_reweight", ["algorithm.guard=true"]),
        (
            [*GRPO, "algorithm.clip_ratio=0.1", "algorithm.clip_ratio_low=0.1", "algorithm.clip_ratio_high=0.2"],
            "clip_ratio",
            ["algorithm.clip_ratio_low=null"],
        ),
        ([*GRPO, "algorithm.log_prob=gaussian"], "log_prob", ["sampling.solver=cps"]),
        ([*SERVICE, "reward.functions.0.workers=2"], "workers", ["reward.spawn=true", "reward.endpoint=null"]),
        ([*SERVICE, "reward.functions.1.max_batch=2"], "max_batch", ["reward.spawn=true", "reward.endpoint=null"]),
    ],
)
def test_keys_without_effect_are_refused(load, errors, overrides, named, reader):
    [line] = errors(GOOD, *overrides)
    assert f"{named}: only read with " in line
    load(GOOD, *overrides, *reader)


def test_a_resolved_recipe_may_name_every_key(load):
    recipe = load(GOOD, *SFT)
    assert list_unread_keys(recipe) == []
    assert load(recipe_file.dump_recipe(recipe)) == recipe
