"""The training command as a user types it, and all files that it writes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from commands import wfm_command
from pages import code
from wfm_ds.models import registry
from wfm_ds.recipe import file as recipe_file

ROOT = Path(__file__).parent.parent.parent
RECIPE = "tests/recipes/sd3_nft.yaml"
CHANGES = ["validation.held_out_rewards=[jpeg_incompressibility]", "logging.peak_tflops=1"]
DEADLINE_S = 240


def command(*arguments, launcher="deepspeed"):
    if launcher == "python":
        return [sys.executable, *arguments]
    script = shutil.which("deepspeed", path=str(Path(sys.executable).parent))
    assert script, "no deepspeed command beside the interpreter: pip install -e ."
    return [script, *arguments]


def run(*arguments, cwd=ROOT, **kwargs):
    """Run the command with a minimal environment: PATH, HOME, and thread, Hub and cache settings."""
    kept = ("PATH", "HOME", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_CBWR", "HF_HUB_OFFLINE", "TMPDIR", "WFM_CACHE")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    return subprocess.run(
        command(*arguments, **kwargs),
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Run the tiny recipe on two ranks, a single time for this file. Return its output folder."""
    folder = tmp_path_factory.mktemp("runs") / "nft"
    process = run("--num_gpus", "2", "-m", "wfm_ds.train", RECIPE, f"run.output_dir={folder}", *CHANGES)
    assert process.returncode == 0, process.stdout + process.stderr
    (folder.parent / "console.txt").write_text(process.stderr)
    return folder


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_start_logs_its_long_operations(finished):
    console = (finished.parent / "console.txt").read_text()
    wanted = ["reading data recipes/prompts/colors", "INFO 12 prompts", "loading model tiny:sd3", "model loaded, "]
    places = [console.find(line) for line in [*wanted, "first step completed "]]
    assert -1 not in places
    assert places == sorted(places)
    for rank in (0, 1):
        assert "LoRA of rank 4 on 19 layers" in (finished / "logs" / f"rank_{rank}.log").read_text()


def test_result_tells_how_the_run_ended(finished):
    result = json.loads((finished / "result.json").read_text())
    assert (result["status"], result["step"]) == ("finished", 2)
    assert result["artifacts"] == {"lora": str(finished / "safetensors" / "step_2" / "lora")}
    assert result["metrics"]["val/reward/color/mean"] > 0


def test_resolved_recipe_is_a_recipe_with_the_same_values(finished):
    resolved = recipe_file.load_recipe(finished / "recipe.yaml")
    assert resolved == recipe_file.load_recipe(ROOT / RECIPE, [f"run.output_dir={finished}", *CHANGES])


def test_metrics_have_a_line_per_step_and_per_evaluation(finished):
    records = lines(finished / "metrics.jsonl")
    assert [r["step"] for r in records if "loss/total" in r] == [1, 2]
    assert [r["step"] for r in records if "val/reward/color/mean" in r] == [0, 2]


def test_first_step_runs_no_forward_of_the_old_policy_and_later_ones_do(finished):
    steps = [r for r in lines(finished / "metrics.jsonl") if "loss/total" in r]
    # Each rank has 4 samples with 2 noise levels each, in micro-batches of 8: one forward. Rollouts have 4 steps.
    assert [r.get("perf/forwards_old") for r in steps] == [None, 1]
    assert [r["perf/forwards_policy"] for r in steps] == [1, 1]
    assert [r["perf/forwards_rollout"] for r in steps] == [4, 4]


def test_every_emitted_tag_is_documented_and_nothing_else(finished):
    emitted = {tag for record in lines(finished / "metrics.jsonl") for tag in record} - {"step", "time"}
    page = (ROOT / "docs" / "metrics.md").read_text()
    table = [row.split("|")[1] for row in page.splitlines() if row.startswith("| `")]
    documented = {
        tag: re.compile(re.escape(tag).replace("<f>", r"[\w/]+").replace("<j>", r"\d+") + r"\Z")
        for cell in table
        for tag in re.findall(r"`([^`]+)`", cell)
    }
    assert [tag for tag in emitted if not any(p.match(tag) for p in documented.values())] == []
    # Tags that this run does not log: those for other algorithms, guidance, clipped rewards, every tenth step, rollouts
    # in other processes, long videos, and periodic events.
    elsewhere = re.compile(
        r"sft/|dpo/|vlm/|data/|policy/|ddrl/|ram/|dgpo/|dmd/|opd/|kl/ema|loss/(data|fake)|optim/fake_|val/(loss|(token_)?accuracy)|weights/"
        r"|reward/(total/clipped_fraction|.*/after_)|rollout/history_broken|val/.*/(clip_|drift)|val/recording/"
        r"|time/((ema|group_statistics|fake|teacher[_0-9]*)_forward|data_wait|encode|export|checkpoint|validation|rollout_wait|publish)"
        r"|rollout/(staleness|dropped|workers|candidates|refills|groups_dropped|regenerated|spread)"
        r"|val/(reward|held_out)/.*(rank_correlation|rollout_mean|ci95)"
        r"|perf/(forward(s|_samples)_(ema|group_statistics|uncond|validation|fake|fake_policy|teacher.*)|peak_memory_gib/|tokens_per_second)"
    )
    silent = [tag for tag, p in documented.items() if not any(p.match(e) for e in emitted)]
    assert [tag for tag in silent if not elsewhere.match(tag)] == []


def test_held_out_rewards_run_only_at_evaluations(finished):
    records = lines(finished / "metrics.jsonl")
    first, last = [r for r in records if "val/held_out/jpeg_incompressibility/mean" in r]
    assert "val/alarm" not in first
    assert last["val/alarm"] == 0
    moved = last["val/held_out/jpeg_incompressibility/mean"] - first["val/held_out/jpeg_incompressibility/mean"]
    assert last["val/held_out/jpeg_incompressibility/change"] == pytest.approx(moved)
    assert not [tag for r in records for tag in r if tag.startswith("reward/jpeg_incompressibility")]
    shown = lines(finished / "samples" / "step_2" / "samples.jsonl")
    assert shown[0]["rewards"].keys() == {"color", "jpeg_compressibility", "jpeg_incompressibility"}
    warned = "validation.held_out_rewards score only 4 prompts: no alarm is possible. Set validation.num_prompts to 12"
    assert warned in (finished.parent / "console.txt").read_text()


def test_tensorboard_has_the_same_scalars_and_images(finished):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished / "tensorboard"), size_guidance={"images": 0})
    events.Reload()
    records = [r for r in lines(finished / "metrics.jsonl") if "loss/total" in r]
    for tag in ("loss/total", "reward/color/mean", "optim/grad_norm"):
        points = events.Scalars(tag)
        assert [p.step for p in points] == [1, 2]
        np.testing.assert_allclose([p.value for p in points], [r[tag] for r in records], rtol=1e-6)
    assert [image.step for image in events.Images("samples")] == [0, 2]


@pytest.mark.slow
def test_an_evaluation_compares_the_run_with_its_base_pair_by_pair(finished, tmp_path, capsys):
    from wfm_ds.cli.main import main

    prompts = tmp_path / "some.txt"
    prompts.write_text("".join(f"a {color} circle\n" for color in ("red", "green", "blue", "white", "black")))
    base, out = str(recipe_file.load_recipe(finished / "recipe.yaml").model.path), tmp_path / "evaluation"
    words = [base, base, str(finished), "--prompts", str(prompts), "--held-out", "jpeg_incompressibility"]
    assert main(["evaluate", *words, "--seeds", "2", "--batch", "5", "--out", str(out), "--fail-on", "no gain"]) == 3
    content = json.loads((out / "evaluation.json").read_text())
    again, trained = content["models"]
    for gap in again["differences"].values():  # the same model and noise give identical images
        assert gap["value"] == gap["low"] == gap["high"] == gap["better"] == 0
    assert again["diversity_ratio"]["value"] == 1
    assert trained["trained_on"] == ["color", "jpeg_compressibility"]
    assert trained["related"] == ["jpeg_incompressibility"]
    assert trained["differences"]["color"]["samples"] == 10
    rows = (out / "evaluation.csv").read_text().splitlines()
    assert len(rows) == 1 + 3 * 5 * 2
    for file in re.findall(r'<img src="([^"]*)"', (out / "index.html").read_text()):
        assert (out / file).is_file()
    assert lines(out / trained["name"] / "samples.jsonl")[3]["rewards"].keys() == {*trained["differences"]}
    assert "wrote" in capsys.readouterr().out


def test_plain_diffusers_reproduces_the_trainers_images_from_the_export(finished):
    """Diffusers loads the export by the two documented lines. Its images match the run's PNGs within 1 of 255."""
    base = recipe_file.load_recipe(finished / "recipe.yaml").model.path
    from wfm_ds.models import registry

    pipe = DiffusionPipeline.from_pretrained(registry.resolve_pipeline(base))
    pipe.set_progress_bar_config(disable=True)
    pipe.load_lora_weights(
        str(finished / "safetensors" / "step_2" / "lora"), weight_name="model.safetensors", adapter_name="default"
    )
    assert pipe.get_active_adapters() == ["default"]
    assert pipe.transformer.peft_config["default"].lora_alpha == 8
    folder = finished / "samples" / "step_2"
    for entry in lines(folder / "samples.jsonl")[:3]:
        image = pipe(
            entry["prompt"],
            num_inference_steps=4,
            guidance_scale=1.0,
            height=32,
            width=32,
            max_sequence_length=16,
            generator=torch.Generator("cpu").manual_seed(entry["seed"]),
        ).images[0]
        ours = np.asarray(Image.open(folder / entry["file"]), dtype=np.int16)
        assert np.abs(np.asarray(image, dtype=np.int16) - ours).max() <= 1


def test_generate_reproduces_the_samples_of_a_lora_run(finished, tmp_path):
    base = recipe_file.load_recipe(finished / "recipe.yaml").model.path
    ours = drawn(finished / "samples" / "step_2")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(dict.fromkeys(prompt for prompt, _ in ours)))
    arguments = ["--model", base, "--prompts", prompts, "--height", "32", "--width", "32", "--steps", "4"]
    lora = ["--lora", finished / "safetensors" / "step_2" / "lora"]
    for seed in (1000001, 1000002):  # of rank 0 and of rank 1: the batches of the run
        words = [*arguments, "--seeds", seed, "--batch", "4"]
        assert wfm_command("generate")([*words, *lora, "--out", tmp_path / f"lora_{seed}"]) == 0
        assert wfm_command("generate")([*words, "--out", tmp_path / f"base_{seed}"]) == 0
        theirs, bases = drawn(tmp_path / f"lora_{seed}"), drawn(tmp_path / f"base_{seed}")
        assert len(theirs) == 4
        for key, image in theirs.items():
            assert_equal_up_to_last_bits(image, ours[key])
            assert np.count_nonzero(image != bases[key]) > 50


@pytest.mark.slow
def test_generate_reproduces_the_samples_of_a_full_run(tmp_path):
    recipe = ROOT / "tests" / "recipes" / "sd3_nft_full.yaml"
    process = run("-m", "wfm_ds.train", str(recipe), f"run.output_dir={tmp_path / 'run'}", launcher="python")
    assert process.returncode == 0, process.stdout + process.stderr
    resolved = recipe_file.load_recipe(tmp_path / "run" / "recipe.yaml")
    samples = tmp_path / "run" / "samples" / f"step_{resolved.run.steps}"
    (tmp_path / "prompts.txt").write_text("".join(f"{text}\n" for text in dict.fromkeys(p for p, _ in drawn(samples))))
    size, seeds = resolved.sampling, resolved.validation.seeds
    arguments = ["--height", str(size.height), "--width", str(size.width), "--steps", str(size.eval_steps)]
    arguments += ["--seeds", *map(str, seeds), "--batch", str(len(drawn(samples)))]
    exported = str(tmp_path / "run" / "safetensors" / f"step_{resolved.run.steps}")
    where = ["--pipeline", exported, "--prompts", str(tmp_path / "prompts.txt"), "--out", str(tmp_path / "out")]
    assert wfm_command("generate")([*where, *arguments]) == 0
    generated = drawn(tmp_path / "out")
    for key, image in drawn(samples).items():
        assert_equal_up_to_last_bits(generated[key], image)


@pytest.mark.slow
@pytest.mark.long
def test_plain_diffusers_reproduces_the_samples_of_a_few_step_run(tmp_path):
    from wfm_ds.export.loading_code import loading_lines

    words = ["run.steps=1", "sampling.solver=ode", "sampling.grid=even", "sampling.eval_grid=even"]
    words += ["sampling.eval_steps=2", f"run.output_dir={tmp_path / 'run'}"]
    process = run("-m", "wfm_ds.train", "tests/recipes/sana_image_nft.yaml", *words, launcher="python")
    assert process.returncode == 0, process.stdout + process.stderr
    lora = tmp_path / "run" / "safetensors" / "step_1" / "lora"
    assert (
        f"FlowMatchEulerDiscreteScheduler.from_pretrained({json.dumps(str(lora))})" in process.stdout + process.stderr
    )
    names = {}
    exec(loading_lines(registry.resolve_pipeline("tiny:sana"), lora, lora=True), names)
    call = json.loads((lora / "call.json").read_text()) | {"output_type": "np"}
    for (prompt, seed), image in drawn(tmp_path / "run" / "samples" / "step_1").items():
        generator = torch.Generator("cpu").manual_seed(seed)
        pixels = names["pipe"](**call | {"prompt": prompt}, generator=generator).images[0]
        assert np.abs(255 * pixels - image).max() <= 1


def assert_equal_up_to_last_bits(image, other):
    """With AVX-512, the last bits of oneDNN's results differ between processes: some pixels are rounded differently."""
    assert np.abs(image.astype(int) - other).max() <= 1
    assert np.count_nonzero(image != other) < 4


def drawn(folder):
    """Return the images of a folder by (prompt, seed)."""
    rows = lines(folder / "samples.jsonl")
    return {(row["prompt"], row["seed"]): np.asarray(Image.open(folder / row["file"])) for row in rows}


@pytest.mark.slow
def test_finished_run_is_not_trained_again_by_the_same_command(finished):
    before = {path: path.read_bytes() for path in finished.glob("*.json*")}
    process = run("--num_gpus", "2", "-m", "wfm_ds.train", RECIPE, f"run.output_dir={finished}")
    assert process.returncode == 0, process.stdout + process.stderr
    assert f"{finished}: this run finished at step 2, nothing to do" in process.stderr
    assert {path: path.read_bytes() for path in finished.glob("*.json*")} == before


@pytest.mark.slow
def test_misspelt_key_is_one_message_and_exit_code_2_from_all_ranks(tmp_path):
    recipe = tmp_path / "mine.yaml"
    text = (ROOT / RECIPE).read_text().replace("timestep_fraction", "timestep_fracton")
    recipe.write_text(text)
    number = next(i for i, line in enumerate(text.splitlines(), 1) if "timestep_fracton" in line)
    process = run("--num_gpus", "2", "-m", "wfm_ds.train", str(recipe), f"run.output_dir={tmp_path / 'out'}")
    assert process.returncode == 2
    message = one_error(process)
    assert message.startswith(f"error: {recipe}:{number}: algorithm.timestep_fracton")
    assert "did you mean timestep_fraction?" in message
    assert not (tmp_path / "out").exists()


RAISES_ON_RANKS = """import os

if "RANK" in os.environ:
    raise OSError("no disk today")

"""


@pytest.mark.slow
def test_a_failed_wfm_train_prints_its_error_and_nothing_of_the_launcher(tmp_path):
    (tmp_path / "mine.py").write_text(RAISES_ON_RANKS + code("own_algorithm.md", "my_algorithm.py"))
    words = [str(ROOT / RECIPE), "algorithm.name=mine:RewardWeighted", f"data.path={ROOT / 'recipes/prompts/colors'}"]
    process = run("-m", "wfm_ds", "train", *words, "--gpus", "2", cwd=tmp_path, launcher="python")
    assert process.returncode == 2
    assert one_error(process).endswith(f"importing 'mine' failed in {tmp_path / 'mine.py'}:4: OSError: no disk today")
    assert "launch" not in process.stdout + process.stderr


def one_error(process):
    """Return the only line that starts with `error:`. Fails if the output has a traceback."""
    output = process.stdout + process.stderr
    assert "Traceback" not in output, output
    found = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(found) == 1, output
    return found[0]


@pytest.mark.slow  # tests/cli/test_wfm.py runs `wfm check` by default
def test_check_prints_the_numbers_and_writes_nothing(tmp_path):
    process = run("-m", "wfm_ds.train", RECIPE, "--check", f"run.output_dir={tmp_path / 'out'}", launcher="python")
    assert process.returncode == 0, process.stderr
    assert "samples per step           8 (8 per rank)" in process.stdout
    assert process.stdout.rstrip().endswith("all checks passed")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_stop_signal_saves_after_the_step_and_the_same_command_resumes(tmp_path):
    """On SIGTERM, both ranks finish the step, save and export, and the command returns 0. The same command resumes."""
    folder = tmp_path / "out"
    arguments = ["--num_gpus", "2", "-m", "wfm_ds.train", RECIPE, f"run.output_dir={folder}"]
    metrics, log = folder / "metrics.jsonl", tmp_path / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            command(*arguments, "run.steps=100000"),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        end_s = time.monotonic() + DEADLINE_S
        while not (metrics.exists() and '"loss/total"' in metrics.read_text()):  # the first step
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end_s, log.read_text()
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        process.wait(DEADLINE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, log.read_text()
    result = json.loads((folder / "result.json").read_text())
    step = result["step"]
    assert result["status"] == "preempted"
    assert 1 <= step < 100000
    assert (folder / "safetensors" / f"step_{step}" / "lora" / "model.safetensors").is_file()
    assert (folder / "checkpoints" / "LATEST").read_text() == f"step_{step}\n"

    continued = run(*arguments, f"run.steps={step + 2}")
    assert continued.returncode == 0, continued.stdout + continued.stderr
    assert f"continues after step {step} from" in continued.stderr
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["step"]) == ("finished", step + 2)
    steps = [r["step"] for r in lines(folder / "metrics.jsonl") if "loss/total" in r]
    assert steps == list(range(1, step + 3))
    assert recipe_file.load_recipe(folder / "recipe.yaml").run.steps == step + 2


@pytest.mark.slow
def test_an_error_before_the_first_step_removes_the_written_files(tmp_path):
    """A reward fails to load when its service starts. The run's files are removed, so a fixed recipe can start."""
    folder = tmp_path / "out"
    (tmp_path / "my_rewards.py").write_text(
        "from wfm_reward.base import Range, Reward, RewardError\n"
        "class Broken(Reward):\n"
        "    name, media_types = 'broken', frozenset({'image'})\n"
        "    outputs, primary_output = {'broken': Range(0, 1)}, 'broken'\n"
        "    def load(self):\n"
        "        raise RewardError('the weights are not here')\n"
        "    def score(self, batch):\n"
        "        return []\n"
    )
    broken = "reward.functions=[{name: 'my_rewards:Broken'}]"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.run(
        command("-m", "wfm_ds.train", RECIPE, f"run.output_dir={folder}", broken, launcher="python"),
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert process.returncode == 2, process.stdout + process.stderr
    assert "the weights are not here" in one_error(process)
    # Only the service's logs remain, and the file that marks the folder as a run folder.
    assert sorted(f.name for f in folder.iterdir() if f.name != ".lock") == [".wfm_run.json", "reward"]


@pytest.mark.slow
def test_overwriting_checks_everything_before_it_clears_the_folder(finished):
    process = run(
        "-m",
        "wfm_ds.train",
        RECIPE,
        f"run.output_dir={finished}",
        "model.path=/nowhere",
        "--overwrite",
        launcher="python",
    )
    assert process.returncode == 2
    assert (finished / "safetensors" / "step_2" / "lora" / "model.safetensors").is_file()
    assert json.loads((finished / "result.json").read_text())["status"] == "finished"
