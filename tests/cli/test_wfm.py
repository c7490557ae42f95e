"""The `wfm` command: its subcommands, fast --help, and one-line errors."""

import importlib
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from each_case import check_each
from shipped import SHIPPED
from wfm_ds import __version__
from wfm_ds.cli import check, models, recipes, rewards, train
from wfm_ds.cli.main import COMMANDS, main
from wfm_ds.models.assets import hub
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe import shipped_recipes
from wfm_ds.recipe.annotated_text import annotate_recipe

HELP_COST = (
    1.5  # CPU time of a help, in imports of numpy and pydantic in the same process; torch costs six, scipy.stats four
)
HEAVY = ("torch", "deepspeed", "diffusers", "transformers", "sklearn")
ASK = f"""
import contextlib, io, json, sys, time
began = time.process_time()
import argparse, numpy, pydantic
pydantic.create_model("Model", x=(int, 1))
unit = time.process_time() - began
from wfm_ds.cli.main import main
for name in json.loads(sys.argv[1]):
    began, shown = time.process_time(), io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        main([*name.split(), "--help"])
    heavy = [m for m in {HEAVY} if m in sys.modules]
    print(json.dumps([name, (time.process_time() - began) / unit, heavy, shown.getvalue()]))
"""


def test_help_is_fast_and_imports_nothing_heavy():
    costs = {name: [] for name in ("", *COMMANDS)}
    # load on the machine changes the ratio a little
    while not costs[""] or (max(map(min, costs.values())) > HELP_COST and len(costs[""]) < 4):
        told = subprocess.run(
            [sys.executable, "-c", ASK, json.dumps(list(costs))], capture_output=True, text=True, check=True, timeout=60
        )
        for name, cost, heavy, shown in map(json.loads, told.stdout.splitlines()):
            costs[name].append(cost)
            assert heavy == [], name
            assert shown.startswith(f"usage: wfm {name}".rstrip())
    assert [name for name, found in costs.items() if min(found) > HELP_COST] == []


def test_every_command_is_a_module_with_a_parser_and_work():
    modules = {module for module, _ in COMMANDS.values()}
    assert modules > {module.__name__ for module in (check, models, recipes, rewards, train)}
    for module in modules:
        found = importlib.import_module(module)
        assert callable(found.run)
        assert found.parser().prog


def test_python_m_is_the_same_command():
    told = subprocess.run([sys.executable, "-m", "wfm_ds", "--version"], capture_output=True, text=True, check=True)
    assert told.stdout == f"wfm_ds {__version__}\n"


@check_each(
    ("words", "sentence"),
    [
        ("trian r.yaml", "wfm trian: unknown command; did you mean wfm train?"),
        ("data digits/none", "digits/none not found. Create it: wfm data digits digits"),
        ("data digit", "digit not found. For a dataset of the Hugging Face Hub set data.kind: hf"),
        ("train", "the following arguments are required: recipe (see wfm train --help"),
        ("train sd3_nft --gpu 2 --colour", "unrecognized arguments: --colour (see wfm train --help"),
        ("train sd3_nft --gpus 0", "argument --gpus: '0' is not a positive integer"),
        ("train sd3_nft --nodes 2", "--nodes requires --hostfile"),
        ("train sd3_nft --hostfile none", "--hostfile: file none not found"),
        ("train digits/nftt", "digits/nftt: recipe file not found; did you mean digits/nft"),
        ("train sd3_nft run.stepz=2", "override run.stepz=2: run.stepz is not a key"),
        ("check none.yaml", "none.yaml: recipe file not found"),
        ("recipes show sd3_nf", "unknown shipped recipe 'sd3_nf'; did you mean sd3_nft"),
        ("recipes copy", "usage: wfm recipes copy NAME [FILE]"),
        ("recipes list zzz", "no shipped recipe matches zzz"),
        ("recipes copy sd3_nft none/mine.yaml", "none/mine.yaml: folder none not found"),
        ("rewards ocrr", "unknown reward 'ocrr'; did you mean ocr?"),
        ("models none", "none does not exist; PATH must be"),
        ("data {pictures}", "{pictures}: 1 image without captions. Put NAME.txt next to each, set --prompt to"),
        ("init --data {pictures} --model none", "none does not exist; --model must be"),
        (
            "init --data {pictures} --model tiny:sd3",
            "{pictures}: 1 image without captions. Put NAME.txt next to each, set --prompt",
        ),
        ("answer none why", "none has no config.json: pass an export"),
        ("answer tiny:qwen25vl --image none.png why", "none.png is not a file"),
        ("generate", "the following arguments are required"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(words, sentence, capsys, tmp_path):
    (tmp_path / "0.png").write_bytes(b"")
    assert main(words.format(pictures=tmp_path).split()) == 2
    out, said = capsys.readouterr()
    assert said.startswith(f"error: {sentence.format(pictures=tmp_path)}")
    assert (out, said.count("\n")) == ("", 1)


# ---- train


def dry(words, capsys, monkeypatch, *, gpus=False):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr("wfm_ds.cli.train.has_gpus", lambda: gpus)
    assert main(["train", *words.split(), "--dry-run"]) == 0
    return capsys.readouterr().out.strip()


def test_wfm_train_runs_the_deepspeed_command(capsys, monkeypatch, tmp_path):
    (tmp_path / "hosts").write_text("node1 slots=8\n")
    assert (
        dry("sd3_nft --tiny run.steps=4 --gpus 2 --overwrite", capsys, monkeypatch)
        == "deepspeed --log_level critical --num_gpus 2 --module wfm_ds.train sd3_nft run.steps=4 --tiny --overwrite"
    )
    assert dry("sd3_nft", capsys, monkeypatch).endswith(" --num_gpus 1 --module wfm_ds.train sd3_nft")
    # steps=4 fits the window of the tiny recipe, but not the window of the full recipe.
    assert dry("sd3_flow_grpo_fast --tiny sampling.steps=4", capsys, monkeypatch).endswith(" sampling.steps=4 --tiny")
    assert main(["train", "sd3_flow_grpo_fast", "sampling.steps=4", "--dry-run"]) == 2
    assert dry("sd3_nft -v", capsys, monkeypatch, gpus=True) == "deepspeed --module wfm_ds.train sd3_nft"
    hosts = f"--hostfile {tmp_path / 'hosts'}"
    assert (
        dry(f"sd3_nft {hosts} --nodes 1 --gpus 8", capsys, monkeypatch)
        == f"deepspeed --log_level critical {hosts} --num_nodes 1 --num_gpus 8 --module wfm_ds.train sd3_nft"
    )


def test_processes_without_a_gpu_are_announced(capsys, monkeypatch):
    monkeypatch.setattr("wfm_ds.cli.train.has_gpus", lambda: False)
    monkeypatch.setattr("wfm_ds.launch.run_launcher", lambda line: 0)
    monkeypatch.setattr("wfm_ds.launch.run_single_rank", lambda line: 0)
    colors = f"data.path={shipped_recipes.recipes_folder() / 'prompts' / 'colors'}"
    data = ["model.path=tiny:sd3", colors, "data.name=prompts", "validation.prompts=null"]
    for words, is_said in (("--gpus 8", True), ("--gpus 1", False), ("", False), ("--gpus 2 --tiny", False)):
        assert main(["train", "sd3_nft", *words.split(), *([] if "--tiny" in words else data)]) == 0
        assert ("starts 8 processes on the CPU" in capsys.readouterr().err) is is_said


def test_the_files_of_other_machines_are_not_checked_here(monkeypatch, tmp_path):
    """DeepSpeed's runner also uses the nodes of its default hostfile."""
    (tmp_path / "hosts").write_text("node1 slots=8\n")
    lines = []
    monkeypatch.setattr("wfm_ds.launch.run_launcher", lambda line: lines.append(line) or 0)
    words = ["train", "sd3_image_sft_lora", "model.path=tiny:sd3", "data.path=nowhere", "--gpus", "8"]
    assert main(words) == 2
    assert main([*words, "--hostfile", str(tmp_path / "hosts")]) == 0
    monkeypatch.setattr("wfm_ds.launch.DEFAULT_HOSTFILE", tmp_path / "hosts")
    assert main(words) == 0
    assert len(lines) == 2


def test_without_a_network_hub_requests_are_not_repeated(capsys, monkeypatch):
    def fail(*address, **options):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    monkeypatch.setenv("NO_PROXY", "localhost")  # is no proxy
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waits for another try"))
    hub.can_find_host.cache_clear()
    assert main(["models", "nobody/nothing"]) == 2
    hub.can_find_host.cache_clear()
    assert capsys.readouterr().err.startswith("error: nobody/nothing is not in the Hub cache")


# ---- recipes


def test_shipped_recipes_are_found_by_name_and_by_the_path_of_the_repository(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    by_name = recipe_file.load_recipe(shipped_recipes.require_recipe("cp_mock"))
    for written in ("cp_mock", "cp_mock.yaml", "recipes/cp_mock.yaml"):
        assert recipe_file.load_recipe(Path(written)) == by_name
    assert by_name.data.path == str(shipped_recipes.recipes_folder() / "prompts" / "colors")
    (tmp_path / "sd3_nft").write_text("mine")
    assert recipe_file.resolve_recipe_path(Path("sd3_nft")).read_text() == "mine"  # the current folder has priority


def test_list_has_a_line_for_each_recipe_and_words_choose(capsys):
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == shipped_recipes.list_recipe_names()
    assert all(len(line) <= 120 and len(line.split()) > 3 for line in lines)
    relative = ("the same", "as above", "as in", "like", "also", "another")  # each line is read alone
    assert [line for line in lines if line.split(maxsplit=1)[1].lower().startswith(relative)] == []
    assert main(["recipes", "list", "Wan", "lora"]) == 0
    chosen = [line.split()[0] for line in lines if "wan" in line.lower() and "lora" in line.lower()]
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == chosen


@check_each("name", ["sd3_nft", "digits/flow_grpo_fast", "cp_mock"])
def test_a_copy_elsewhere_is_the_same_recipe(name, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "copy", name, "mine.yaml"]) == 0
    assert recipe_file.load_recipe(tmp_path / "mine.yaml") == recipe_file.load_recipe(
        shipped_recipes.require_recipe(name)
    )
    assert main(["recipes", "copy", name, "mine.yaml"]) == 2
    assert "mine.yaml exists" in capsys.readouterr().err


def test_show_prints_a_recipe_with_the_values_of_its_defaults_and_their_files(capsys, tmp_path):
    path = shipped_recipes.require_recipe("cp_flow_grpo")
    assert main(["recipes", "show", "cp_flow_grpo"]) == 0
    shown = capsys.readouterr().out
    (tmp_path / "shown.yaml").write_text(shown)
    assert recipe_file.load_recipe(tmp_path / "shown.yaml") == recipe_file.load_recipe(path)
    modeline, _, text = path.read_text().partition("\n")
    assert modeline.startswith(shipped_recipes.MODELINE)
    assert shown.startswith(text.partition("defaults")[0])
    assert "\n  path: nvidia/Cosmos-Predict2.5-2B  # cp_nft.yaml\n" in shown
    assert "\n  max_forward_batch: 1  # as in training: other batch sizes" in shown  # comment of the shipped file
    assert "micro_batch_size" not in shown  # cp_nft.yaml uses the default
    assert main(["recipes", "show", "sd3_flow_grpo_fast"]) == 0
    shown = capsys.readouterr().out
    assert "\n  solver: cps  # replaces flow_sde of sd3_flow_grpo.yaml\n" in shown
    comment = "rounding differences between kernels are as large as the clip range."
    assert f"{comment}\n  micro_batch_size: 9  # sd3_flow_grpo.yaml\n" in shown


@check_each(("name", "recipe"), SHIPPED.items())
@pytest.mark.slow
def test_every_shown_recipe_is_the_recipe(name, recipe, tmp_path):
    (tmp_path / "shown.yaml").write_text(annotate_recipe(shipped_recipes.require_recipe(name)))
    assert recipe_file.load_recipe(tmp_path / "shown.yaml") == recipe


# ---- models and rewards


def test_rewards_are_listed_and_one_is_described(capsys):
    from wfm_reward import registry

    assert main(["rewards"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == registry.list_reward_names()
    assert main(["rewards", "ocr"]) == 0
    told = capsys.readouterr().out
    assert "ocr_reward 0 to 1" in told
    assert "frames='first'" in told


def test_a_folder_is_described(tiny_pipelines, capsys):
    assert main(["models", str(tiny_pipelines("sd3"))]) == 0
    told = capsys.readouterr().out
    assert "StableDiffusion3Pipeline" in told
    assert "(lora.target_modules)" in told
    assert "transformer" in told.partition("weights\n")[2]
    assert main(["models"]) == 0
    assert "StableDiffusion3Pipeline" in capsys.readouterr().out


# ---- checks in an empty folder


@pytest.mark.slow
def test_a_shipped_recipe_is_checked_in_an_empty_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["check", "sd3_nft", "--tiny", "--gpus", "2", "run.seed=3", "model.dtype=float32"]) == 0
    command = "wfm train sd3_nft run.seed=3 model.dtype=float32 --tiny --gpus 2"
    assert capsys.readouterr().out.endswith(f"ready: 2 processes, 2 steps; next: {command}\n")
    assert list(tmp_path.iterdir()) == []


def test_a_check_of_a_language_recipe_is_one_object_for_programs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["check", "reason_llava_sft", "--tiny", "--gpus", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["facts"]["recipe"] == "vlm_sft, all weights"
    assert told["derived"]["world_size"] == 2
    phases = told["memory"]["phases"]
    assert told["memory"]["peak"] == max(sum(parts.values()) for parts in phases.values())
    assert 0 < told["parameters"]["trained"] < told["parameters"]["all"]  # the vision tower is frozen
