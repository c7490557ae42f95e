"""Starts are fast: recipe errors are reported before torch is imported, and a check or a run starts within seconds."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from each_case import check_each
from wfm_ds.errors import DataError, ModelError, RecipeError
from wfm_ds.recipe import file as recipe_file
from wfm_ds.training.early_checks import check_early, require_free_port

HEAVY = ("torch", "deepspeed", "diffusers", "transformers", "sklearn")
REFUSAL_S, CHECK_LIMIT, STEP_LIMIT = 1.5, 1.6, 2.6  # CPU seconds; multiples of the time to import the libraries
LIBRARIES = "from diffusers import StableDiffusion3Pipeline; import deepspeed, peft"
TINY = "model.path=tiny:sd3"
UNREADABLE = "bad.txt"  # a link to a file that can be opened, but not read, even by root
NOT_CACHED = "owner/none is not in the Hub cache (and not a local folder), and the Hub cannot be reached; on a machine"
REFUSALS = {
    "check sd3_nft run.stepz=3": "run.stepz is not a key of run; did you mean steps?",
    "train sd3_nft optimizer.lr=-1": "optimizer.lr",
    "train no_such.yaml": "no_such.yaml: recipe file not found",
    f"check sd3_image_sft_lora {TINY} data.path=nowhere": "nowhere is not a folder",
    f"train sd3_image_sft_lora {TINY} data.path=nowhere --gpus 1": "nowhere is not a folder",
    f"check sd3_dpo {TINY} data.path=pairs.jsonl": "pairs.jsonl not found",
    f"check sd3_nft {TINY} data.path=nowhere": "data.path nowhere is not a folder",
    "check reason_llava_sft model.revision=null model.path=tiny:qwen25vl data.path=no.json": "no.json not found",
    "check sd3_nft model.revision=null model.path=models/none": "models/none does not exist",
    "check sd3_nft model.path=tiny:none": "none is not a tiny pipeline",
    "check sd3_nft model.path=tiny:qwen25vl": "tiny:qwen25vl is a vision-language model",
    "check reason_llava_sft model.path=tiny:sd3": "sd3 is not a tiny vision-language model",
    "check sd3_nft --tiny 'reward.functions=[{name: nonsens}]'": "unknown reward 'nonsens'",
    "check sd3_nft --tiny 'reward.functions=[{name: ocr, options: {lang: x}}]'": "lang",
    "check sd3_nft --tiny run.output_dir=/proc/x": "run.output_dir /proc/x cannot be created",
    "train sd3_nft --tiny run.output_dir=/proc/x": "run.output_dir /proc/x cannot be created",
    "check sd3_nft --tiny data.cache_dir=/proc/x": "data.cache_dir /proc/x cannot be created: /proc is not a writable",
    f"check reason_llava_sft model.revision=null model.path=tiny:qwen25vl data.path={UNREADABLE}": "cannot be read (",
    f"check sd3_nft {TINY} 'data={{kind: prompts, path: ., split: bad}}'": "bad.txt cannot be read: ",
    f"check sd3_nft {TINY} 'data={{kind: prompts, path: ., split: good}}' validation.prompts={UNREADABLE}": (
        "bad.txt cannot be read: "
    ),
    "check sd3_nft model.path=owner/none model.revision=null": NOT_CACHED,
    "check reason_llava_sft data.path=bad.txt model.path=owner/none model.revision=null": NOT_CACHED,
    f"check sd3_image_sft {TINY} 'data={{kind: lerobot, path: owner/none}}'": (
        "hf download --repo-type dataset owner/none"
    ),
    "train cp_nft --tiny rollout.mode=async rollout.bind=tcp://127.0.0.1:9": "tcp:// needs keys",
    "init --data nowhere --model tiny:sd3": "nowhere not found",
    "init --data . --model models/none": "error: ",
    "answer tiny:qwen25vl --image none.png ?": "none.png",
    "answer tiny:qwen25vl '<image> ?'": "1 <image> tags, 0 images",
    "answer . ?": "has no config.json",
}
ASK = """
import contextlib, io, json, shlex, sys
from wfm_ds.cli.main import main
answers = []
for line in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = main(shlex.split(line))
    answers.append([code, said.getvalue(), [name for name in json.loads(sys.argv[2]) if name in sys.modules]])
print(json.dumps(answers))
"""


def run_python(code, *arguments, folder):
    """Run code in a process and return (its output, CPU seconds of the process and its children)."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("DS_ACCELERATOR", None)  # wfm_ds must choose the accelerator itself
    began = os.times()
    result = subprocess.run(
        [sys.executable, *code, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    ended = os.times()
    used = ended.children_user + ended.children_system - began.children_user - began.children_system
    return result, used


def test_mistakes_are_refused_before_torch_is_imported(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "good.txt").write_text("a cup")
    (tmp_path / UNREADABLE).symlink_to("/proc/self/mem")
    lines = json.dumps(list(REFUSALS))
    result, _ = run_python(["-c", ASK], lines, json.dumps(HEAVY), folder=tmp_path)
    assert result.returncode == 0, result.stderr
    for (line, sentence), (code, said, heavy) in zip(REFUSALS.items(), json.loads(result.stdout), strict=True):
        assert (code, heavy) == (2, []), (line, said)
        assert sentence in said, (line, said)


def test_an_earlier_run_is_refused_early(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "run").mkdir()
    overrides = [TINY, f"run.output_dir={tmp_path / 'run'}", f"data.path={tmp_path / 'data'}"]
    recipe = recipe_file.load_tiny_recipe(Path("sd3_image_sft_lora"), overrides)
    check_early(recipe, 1)
    other = recipe_file.load_tiny_recipe(Path("sd3_image_sft_lora"), [*overrides, "run.seed=9"])
    (tmp_path / "run" / "recipe.yaml").write_text(recipe_file.dump_recipe(other))
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    with pytest.raises(RecipeError, match=re.escape(str(tmp_path / "run"))):
        check_early(recipe, 1)


def test_a_port_in_use_is_refused_and_an_address_of_another_machine_is_not():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(RecipeError, match=f"port {port} of tcp://127.0.0.1:{port} is in use"):
            require_free_port(f"tcp://127.0.0.1:{port}")
    require_free_port(f"tcp://127.0.0.1:{port}")
    require_free_port("tcp://192.0.2.1:6200")
    require_free_port("tcp://no.such.host.invalid:6200")


@check_each(
    ("recipe", "overrides", "error"),
    [
        ("sd3_image_sft_lora", ["data={kind: folder, path: .}", "validation.path=nowhere"], DataError),
        ("sd3_image_sft_lora", ["data={kind: hf, path: a/b}"], None),
        ("sd3_image_sft_lora", ["data={kind: hf, path: a/b}", "validation.path=a/c"], None),
        (
            "sd3_image_sft_lora",
            ["data={kind: hf, path: a, streaming: true, shuffle: false}", "validation.path=nowhere"],
            DataError,
        ),
        ("sd3_image_sft_lora", ["data={kind: webdataset, path: 'none/{0..2}.tar'}"], DataError),
        ("sd3_image_sft_lora", ["data={kind: webdataset, path: 's3://b/{0..2}.tar'}"], None),
        ("sd3_image_sft_lora", ["data={kind: sets, path: ., sets: [{path: nowhere}]}"], DataError),
        ("sd3_image_sft_lora", ["data={kind: cosmos, path: nowhere}"], DataError),
        ("sd3_image_sft_lora", ["data={kind: folder, path: .}", "model.path=."], ModelError),
        ("reason_llava_sft", ["data={kind: llava, path: s3://b/rows/}", "model.path=tiny:qwen25vl"], None),
    ],
)
def test_local_data_and_models_must_exist(tmp_path, monkeypatch, recipe, overrides, error):
    monkeypatch.chdir(tmp_path)
    loaded = recipe_file.load_recipe(Path(recipe), ["model.revision=null", TINY, *overrides])
    if error is None:
        check_early(loaded)
        return
    with pytest.raises(error):
        check_early(loaded)


# ---- CPU time, which is about the wall time of one process on an idle machine


@pytest.fixture(scope="module")
def library_seconds(tmp_path_factory):
    """CPU seconds to import torch, DeepSpeed, peft, transformers and a pipeline of diffusers: no start is faster."""
    folder = tmp_path_factory.mktemp("libraries")
    return min(run_python(["-c", LIBRARIES], folder=folder)[1] for _ in range(2))


@pytest.mark.slow
def test_a_refusal_takes_a_second(tmp_path):
    used = [run_python(["-m", "wfm_ds", "check", "sd3_nft", "run.stepz=3"], folder=tmp_path)[1] for _ in range(3)]
    used += [run_python(["-m", "wfm_ds", "train", "sd3_dpo", TINY], folder=tmp_path)[1] for _ in range(3)]
    assert max(min(used[:3]), min(used[3:])) < REFUSAL_S


@pytest.mark.slow
def test_a_check_takes_little_longer_than_its_imports(tmp_path, library_seconds):
    words = ["-m", "wfm_ds", "check", "sd3_image_sft_lora", "--tiny"]
    result, used = run_python(words, folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert used < CHECK_LIMIT * library_seconds


@pytest.mark.slow
def test_a_run_of_one_process_starts_without_the_launcher(tmp_path, library_seconds):
    words = ["-m", "wfm_ds", "train", "sd3_image_sft_lora", "--tiny", "--gpus=1", "run.steps=1", "validation.every=0"]
    result, used = run_python([*words, "validation.holdout=0"], folder=tmp_path)  # evaluations only write samples
    assert result.returncode == 0, result.stderr
    assert "deepspeed.launcher" not in result.stderr
    lines = [*result.stdout.splitlines(), *result.stderr.splitlines()]
    assert len(lines) <= 20, lines
    unwanted = ("WARN", "torchvision", "accelerator", "TFLOP", "step 0:", "step 1:")
    assert [line for line in lines if any(text in line for text in unwanted)] == []
    assert sum("texts are cached" in line for line in lines) <= 1
    assert used < STEP_LIMIT * library_seconds


@pytest.mark.slow
def test_sigterm_reaches_the_only_rank(tmp_path):
    words = ["-m", "wfm_ds", "train", "sd3_image_sft_lora", "--tiny", "run.steps=100000", "logging.page=false"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen([sys.executable, *words], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        metrics = tmp_path / "outputs" / "tiny" / "sd3_image_sft_lora" / "metrics.jsonl"
        while not (metrics.exists() and metrics.stat().st_size):
            assert run.poll() is None, run.stderr.read()
            time.sleep(0.2)
        (rank,) = psutil.Process(run.pid).children()
        assert "wfm_ds.train" in rank.cmdline()
        run.terminate()
        assert run.wait(300) == 0
    finally:
        run.kill()
        run.wait()
    assert json.loads((metrics.parent / "result.json").read_text())["status"] == "preempted"
