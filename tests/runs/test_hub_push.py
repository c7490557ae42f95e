"""Uploads of exports to a local Hub server: the model card contains no local paths, and failed uploads only warn."""

import json
import logging
import socket
import time
from pathlib import Path
from typing import get_args

import pytest
from huggingface_hub import ModelCard, hf_hub_download
from pydantic import BaseModel

from each_case import check_each
from hub_server import Repo, hub_server, use
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.schema import Recipe
from wfm_ds.runs import hub_push
from wfm_ds.runs.hub_push import PUBLIC_TEXTS, HubPush, hub_loading_lines, list_last_samples, public_values

REPO = "somebody/mine"


@pytest.fixture
def site(tmp_path, monkeypatch):
    with hub_server() as server:
        use(monkeypatch, url=server.url, cache=tmp_path / "cache")
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        yield server


@pytest.fixture
def run(tmp_path):
    """Return a recipe and the LoRA export of a run folder with an export, samples and metrics."""
    out = tmp_path / "private place" / "run"
    lora, samples = out / "safetensors" / "step_2" / "lora", out / "samples" / "step_2"
    for folder in (lora, samples):
        folder.mkdir(parents=True)
    (lora / "model.safetensors").write_bytes(b"weights" * 100)
    settings = {"r": 2, "base_model_name_or_path": str(tmp_path / "private place" / "sd35")}
    (lora / "adapter_config.json").write_text(json.dumps(settings))
    (samples / "0000.png").write_bytes(b"\x89PNG")
    row = {"file": "0000.png", "prompt": "a | <b>red</b> ![circle](http://x)\u2028\u0085", "seed": 1000001}
    (samples / "samples.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n")
    (out / "metrics.jsonl").write_text('{"step": 2, "val/reward/color/mean": 0.25, "time/step": 3}\n')
    recipe = Recipe(
        run={"output_dir": str(out), "steps": 2},
        model={"path": str(tmp_path / "private place" / "sd35")},
        data={"kind": "paired", "path": str(tmp_path / "private place" / "digits")},
        sampling={"height": 32, "width": 32},
        algorithm={"name": "sft"},
        lora={"rank": 2},
        export={"push_to_hub": REPO},
    )
    return recipe, lora


def send(recipe, lora, is_stopped=lambda: False):
    push = HubPush(recipe)
    lines = f'pipe = X.from_pretrained("{recipe.model.path}")\npipe.load_lora_weights("{lora}", weight_name="m")'
    push.send(lora, Path(recipe.model.path), 2, lines)
    push.finish(is_stopped)


def test_an_export_is_pushed_with_a_model_card_without_paths(site, run, tmp_path):
    recipe, lora = run
    send(recipe, lora)
    assert site.commits == [(REPO, "step 2")]
    assert REPO in site.private
    assert site.tokens == {"Bearer hf_secret"}
    files = site.repos[REPO].files
    assert files["model.safetensors"] == b"weights" * 100
    assert files.keys() == {"model.safetensors", "adapter_config.json", "samples/0000.png", "README.md"}
    card = ModelCard(files["README.md"].decode())
    assert (card.data.library_name, card.data.tags) == ("diffusers", ["wfm_ds", "sft", "lora"])
    text = str(card)
    assert "private place" not in text
    for part in (
        f'pipe.load_lora_weights("{REPO}", weight_name="m")',
        'X.from_pretrained("sd35")',
        "| `val/reward/color/mean` | 0.25 |",
        "| ![](samples/0000.png) | a \\| &lt;b&gt;red&lt;/b&gt; \\!\\[circle\\]\\(http://x\\) | 1000001 |",
        "name: sft",
    ):
        assert part in text
    assert "time/step" not in text
    uploaded = json.loads(Path(hf_hub_download(REPO, "adapter_config.json")).read_text())
    assert uploaded == {"r": 2, "base_model_name_or_path": None}


def test_a_refused_push_warns_with_the_command_to_repeat_it(site, run, caplog, monkeypatch):
    recipe, lora = run
    site.repos[REPO] = Repo({}, refusal=(403, "Forbidden"))
    with caplog.at_level(logging.WARNING):
        send(recipe, lora)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
        send(recipe, lora)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("wfm_ds")]
    assert len(said) == 2
    for sentence in said:
        assert f"{lora} was not uploaded (" in sentence
        assert sentence.endswith(f"run: hf upload {REPO} '{lora}' . --private --exclude adapter_config.json")
    assert site.commits == []


@check_each("limits", [{"MIN_WAIT_S": 0.5}, {"STOPPED_WAIT_S": 0.1}])
def test_a_silent_hub_does_not_delay_the_run(run, caplog, monkeypatch, limits):
    """Without a time limit the upload would wait for an hour, even after a signal."""
    recipe, lora = run
    monkeypatch.setattr(hub_push, "POLL_INTERVAL_S", 0.05)
    for name, seconds in limits.items():
        monkeypatch.setattr(hub_push, name, seconds)
    with socket.create_server(("127.0.0.1", 0)) as silent, caplog.at_level(logging.WARNING):
        use(monkeypatch, url=f"http://127.0.0.1:{silent.getsockname()[1]}", cache=lora)
        start_s = time.monotonic()
        send(recipe, lora, is_stopped=lambda: "STOPPED_WAIT_S" in limits)
        assert time.monotonic() - start_s < 30
    [said] = [record.getMessage() for record in caplog.records if "not finished" in record.getMessage()]
    assert f"{lora} was not uploaded (not finished in " in said
    assert "hf upload" in said


def section_classes(annotation):
    """Yield the section classes in a type such as `list[RewardFunction] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from section_classes(part)


def fill_texts(section_class, secret, path=""):
    """Return a section with every text of the schema set to `secret(key)`, without validation.

    A key that is a section, a list of sections or a choice of sections is set to all of its section classes.
    """
    values = {}
    for key, field in section_class.model_fields.items():
        kind, classes = str(field.annotation), list(section_classes(field.annotation))
        if classes:
            values[key] = [fill_texts(one, secret, f"{path}{key}.") for one in classes]
        elif any(word in kind for word in ("str", "Path", "Any")):
            text = secret(f"{path}{key}")
            values[key] = {"url": text} if "dict[" in kind else [text] if "list[" in kind else text
    return section_class.model_construct(**values)


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_a_card_publishes_neither_addresses_nor_secrets(root):
    url, keys = "http://user:SECRET@10.0.0.7:5000/runs?key=SECRET", set()

    def plain(path):
        keys.add(path)
        return None if path in PUBLIC_TEXTS else "SECRET"

    for secret in (lambda path: url, lambda path: f"s3://KEY:SECRET@bucket/{path}", plain):
        published = json.dumps(public_values(fill_texts(Recipe, secret)))
        assert not {word for word in ("SECRET", "10.0.0.7", "bucket", "://", "user") if word in published}
    assert len(keys) > 70
    assert keys >= {"logging.mlflow", "algorithm.teachers.weights", "data.sets.path", "reward.functions.options"}
    held_out = 'validation.held_out_rewards=[{"name": "mock", "options": {"noise": 1}}]'
    public = public_values(recipe_file.load_recipe(root / "tests" / "recipes" / "sd3_nft.yaml", [held_out]))
    assert public["reward"] == {"functions": [{"name": "color"}, {"name": "jpeg_compressibility", "weight": 0.5}]}
    assert public["validation"]["held_out_rewards"] == [{"name": "mock"}]
    assert public["sampling"]["solver"] == "dpm2"


def test_the_model_card_shows_samples_of_the_last_step(tmp_path):
    for name in ("step_2", "step_10", "step_x", "step_"):
        (tmp_path / "samples" / name).mkdir(parents=True)
        (tmp_path / "samples" / name / "0000.png").touch()
    assert list_last_samples(tmp_path) == {"samples/0000.png": tmp_path / "samples" / "step_10" / "0000.png"}


def test_loading_code_for_others_names_no_folder_of_this_machine():
    lines = 'pipe.transformer.load_state_dict(load_file("/out/lora/modules_to_save.safetensors"), strict=False)'
    assert hub_loading_lines(lines, Path("/out/lora"), Path("/base"), REPO).splitlines() == [
        "from huggingface_hub import hf_hub_download",
        "pipe.transformer.load_state_dict(load_file("
        f'hf_hub_download("{REPO}", "modules_to_save.safetensors")), strict=False)',
    ]
