"""`wfm doctor` reports problems that would stop a run: on this machine, in a recipe, and on the hosts of a hostfile."""

import dataclasses
import json
import os
import socket
import time

import pytest
import torch
from packaging.requirements import Requirement

from commands import wfm_command
from each_case import check_each
from wfm_ds.cli.doctor import command as doctor
from wfm_ds.cli.doctor import machine as doctor_machine
from wfm_ds.cli.doctor import recipe as doctor_recipe
from wfm_ds.cli.doctor.finding import DoctorFinding, run_check
from wfm_ds.errors import RecipeError, RewardError
from wfm_ds.memory.estimate import estimate_memory
from wfm_ds.recipe import file as recipe_file
from wfm_ds.runs.model_loading import load_model
from wfm_ds.training import preflight


@pytest.fixture
def recipe(tmp_path, root, tiny_pipelines):
    """`load(*overrides)`: return a recipe that passes all checks, with these overrides."""

    def load(*overrides, name="sd3_nft", family="sd3"):
        settings = [
            f"run.output_dir={tmp_path / 'out'}",
            f"model.path={tiny_pipelines(family)}",
            f"data.path={root / 'recipes' / 'prompts' / 'colors'}",
        ]
        return recipe_file.load_recipe(root / "tests" / "recipes" / f"{name}.yaml", [*settings, *overrides])

    return load


def found(recipe, name, world_size=1):
    (finding,) = [f for f in doctor_recipe.recipe_findings(recipe, world_size) if f.name == name]
    return finding


# ---- the machine


def test_every_package_of_the_environment_fits_and_says_its_version():
    assert doctor_machine.version_finding("no-such-package-of-anybody").level == "error"
    for package in doctor_machine.CHECKED_PACKAGES:
        finding = doctor_machine.version_finding(package)
        assert finding.level == "ok", finding
        assert finding.text[0].isdigit()


def test_a_version_that_another_package_refuses_is_an_error(tmp_path, monkeypatch):
    for name, needs in {"asker": "Requires-Dist: answer<2", "answer": ""}.items():
        folder = tmp_path / f"{name}-3.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 3.0\n{needs}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert list(doctor_machine.unmet_requirements("asker")) == [(Requirement("answer<2"), "3.0")]
    finding = doctor_machine.version_finding("asker")
    assert (finding.level, finding.text) == ("error", "3.0: asker requires answer<2, found 3.0")


def test_another_deepspeed_than_the_tested_one_is_warned_of(root, tmp_path, monkeypatch):
    assert doctor_machine.read_constraints(root / "constraints.txt")["deepspeed"] == doctor_machine.TESTED_DEEPSPEED
    assert doctor_machine.read_constraints(root / "nowhere.txt") == {}
    folder = tmp_path / "deepspeed-0.19.9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.19.9\n")
    monkeypatch.setattr(doctor_machine, "unmet_requirements", lambda package: iter(()))
    monkeypatch.syspath_prepend(tmp_path)
    finding = doctor_machine.version_finding("deepspeed")
    assert (finding.level, finding.advice) == ("warning", "pip install deepspeed==0.19.8")


def test_a_port_in_use_is_an_error_where_machines_must_agree_on_it():
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert doctor_machine.port_finding(port, is_needed=True).level == "error"
        assert doctor_machine.port_finding(port, is_needed=False).level == "warning"
    assert doctor_machine.port_finding(port, is_needed=True).level == "ok"


def test_missing_shared_memory_and_gpus_are_reported(tmp_path):
    finding = doctor_machine.shm_finding(tmp_path / "none")
    assert (finding.level, str(tmp_path) in finding.text) == ("warning", True)
    if not torch.cuda.is_available():
        assert doctor_machine.gpu_finding().level == "warning"


# ---- hosts


def test_hosts_that_do_not_answer_are_errors_of_their_own(tmp_path):
    (tmp_path / "hosts").write_text("one.invalid slots=8\n# spare\ntwo.invalid slots=8\n")
    findings = doctor_machine.host_findings(tmp_path / "hosts")
    assert [(f.name, f.level) for f in findings] == [("host one.invalid", "error"), ("host two.invalid", "error")]


def test_a_host_that_answers_tells_its_clock(tmp_path, monkeypatch):
    """`ssh` is a script that runs the command on this machine."""
    program = tmp_path / "ssh"
    program.write_text('#!/bin/sh\nshift 5\nexec "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "hosts").write_text("here slots=1\n")
    (finding,) = doctor_machine.host_findings(tmp_path / "hosts")
    assert (finding.name, finding.level) == ("host here", "ok")


def test_a_clock_that_the_travel_time_does_not_explain_is_a_warning():
    now = time.time()
    assert doctor_machine.clock_finding("host a", now + 0.5, now, now + 1).level == "ok"
    assert doctor_machine.clock_finding("host a", now + 60, now, now + 1).level == "warning"
    assert doctor_machine.clock_finding("host a", now - 60, now, now + 1).level == "warning"


@check_each("text", ["", "node1\n", "-oProxyCommand=x slots=1\n"])
def test_a_file_that_is_no_hostfile_is_an_error(tmp_path, text):
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(RecipeError, match="slots=8"):
        doctor_machine.read_hosts(tmp_path / "hosts")


# ---- a recipe


def test_a_missing_model_and_missing_data_are_errors_with_their_paths(recipe, tmp_path):
    broken = recipe(f"model.path={tmp_path / 'none'}", f"data.path={tmp_path / 'void'}")
    findings = {f.name: f for f in doctor_recipe.recipe_findings(broken, 1)}
    assert findings["model"].level == findings["data"].level == "error"
    assert str(tmp_path / "none") in findings["model"].text
    assert str(tmp_path / "void") in findings["data"].text
    assert findings["memory"].level == "warning"
    assert "rewards" not in findings


def test_the_model_is_named_by_its_path_and_family(recipe):
    settings = recipe()
    assert found(settings, "model").text == f"{settings.model.path}, family sd3"


def test_an_output_folder_that_cannot_be_made_is_an_error(recipe, tmp_path):
    (tmp_path / "file").write_text("")
    broken = recipe(f"run.output_dir={tmp_path / 'file' / 'out'}", "reward.functions=[{name: mock}]")
    assert found(broken, "output").level == "error"


def test_a_dead_endpoint_is_an_error(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "SERVICE_WAIT_S", 0.3)
    dead = recipe("reward.spawn=false", f"reward.endpoint=ipc://{tmp_path / 'dead'}")
    with pytest.raises(RewardError):
        doctor_recipe.reward_summary(dead)
    assert run_check("rewards", lambda: doctor_recipe.reward_summary(dead)).level == "error"


def test_samples_that_ranks_cannot_share_are_an_error(recipe):
    assert run_check("batch", lambda: doctor_recipe.batch_summary(recipe(), 3)).level == "error"


def test_too_rarely_repeated_prompts_for_selection_are_a_warning(recipe):
    findings = doctor_recipe.recipe_findings(recipe("data.choose=reward_std"), 1)
    finding = next(f for f in findings if f.name == "prompts")
    assert (finding.level, "each of its 12 prompts only 0.33 times" in finding.text) == ("warning", True)


def test_replicas_are_named(recipe):
    shared = recipe("engine.sequence_parallel=2")
    assert doctor_recipe.batch_summary(shared, 4) == "8 samples a step, 4 on each of 2 replicas of 2 ranks"
    assert run_check("batch", lambda: doctor_recipe.batch_summary(shared, 1)).level == "error"


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("sd3_nft", "sd3"),
        ("sd3_nft_full", "sd3"),
        pytest.param("wan22_sft_lora", "wan22", marks=pytest.mark.slow),
        pytest.param("sana_image_nft", "sana", marks=pytest.mark.slow),
        pytest.param("cosmos25_nft", "cosmos25", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_the_estimate_counts_what_the_loaded_model_has(recipe, name, family):
    settings = recipe(name=name, family=family)
    model = load_model(settings, torch.device("cpu"))
    loaded = estimate_memory(settings, model, 2, device="cpu")
    assert doctor_recipe.estimate_from_config(settings, 2) == loaded
    if settings.lora is not None:  # Cosmos's frozen text layer moves to the text encoder
        model.prepare_for_lora(settings.lora.target_modules or model.default_lora_targets)
    assert loaded.num_parameters == sum(p.numel() for p in model.denoiser.parameters())


def test_too_little_disk_space_and_memory_are_errors(recipe):
    settings = recipe("checkpoint.keep=1000000000000")
    sizes = doctor_recipe.estimate_from_config(settings, 1)
    assert doctor_recipe.disk_finding(settings, sizes).level == "error"
    assert doctor_recipe.disk_finding(recipe(), sizes).level == "ok"
    assert doctor_recipe.memory_finding(settings, sizes).level == "ok"
    if not torch.cuda.is_available():
        finding = doctor_recipe.memory_finding(settings, dataclasses.replace(sizes, world_size=10**9))
        assert finding.level == "error"
        assert sizes.peak_phase in finding.text
        assert finding.advice.startswith("change ")


def test_more_ranks_than_gpus_are_a_warning_about_the_reward_service(recipe, monkeypatch):
    monkeypatch.setattr(preflight, "uses_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    finding = next(f for f in doctor_recipe.recipe_findings(recipe(), 16) if f.name == "hosts")
    assert (finding.level, "reward.spawn: true" in finding.text) == ("warning", True)


# ---- the command


def test_json_lists_the_findings_and_errors_make_the_exit_code_2(root, tmp_path, capsys):
    arguments = [str(root / "tests" / "recipes" / "sd3_sft.yaml"), f"model.path={tmp_path}", "--json"]
    assert wfm_command("doctor")([*arguments, f"data.path={tmp_path}", f"run.output_dir={tmp_path / 'out'}"]) == 2
    told = json.loads(capsys.readouterr().out)
    levels = {f["name"]: f["level"] for f in told["findings"]}
    assert told["errors"] == list(levels.values()).count("error") > 0
    assert (levels["python"], levels["torch"], levels["model"], levels["data"]) == ("ok", "ok", "error", "error")
    assert not (tmp_path / "out").exists()


def test_a_recipe_that_does_not_load_is_a_finding_of_the_table(tmp_path, capsys):
    (tmp_path / "bad.yaml").write_text("run: {}\n")
    assert wfm_command("doctor")([str(tmp_path / "bad.yaml"), "--hostfile", str(tmp_path / "none")]) == 2
    out = capsys.readouterr().out
    assert "recipe" in out
    assert "hostfile" in out


def test_a_table_keeps_brackets(capsys):
    doctor.print_table([DoctorFinding("a", "warning", "[b] stays")])
    assert "[b] stays" in capsys.readouterr().out
