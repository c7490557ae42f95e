"""Exports sent to a hub over real sockets, with a card that says nothing of the machine; and a hub that refuses."""

import json
import logging
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, hf_hub_download

from hub_server import Repo, hub_server, use
from wfm_ds.recipe.schema import Recipe
from wfm_ds.runs.hub_push import HubPush, hub_loading_lines
from wfm_ds.runs.model_card import remove_private_values

REPO = "somebody/mine"


@pytest.fixture
def site(tmp_path, monkeypatch):
    with hub_server() as server:
        use(monkeypatch, url=server.url, cache=tmp_path / "cache")
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        yield server


@pytest.fixture
def run(tmp_path):
    """A run's folder: an export, samples and metrics; and its recipe."""
    out = tmp_path / "private place" / "run"
    lora, samples = out / "safetensors" / "step_2" / "lora", out / "samples" / "step_2"
    for folder in (lora, samples):
        folder.mkdir(parents=True)
    (lora / "model.safetensors").write_bytes(b"weights" * 100)
    (lora / "adapter_config.json").write_text("{}")
    (samples / "0000.png").write_bytes(b"\x89PNG")
    row = {"file": "0000.png", "prompt": "a | <b>red</b> circle", "seed": 1000001}
    (samples / "samples.jsonl").write_text(json.dumps(row) + "\n")
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


def send(recipe, lora):
    push = HubPush(recipe)
    lines = f'pipe = X.from_pretrained("{recipe.model.path}")\npipe.load_lora_weights("{lora}", weight_name="m")'
    push.send(lora, Path(recipe.model.path), 2, lines)
    push.finish(timeout_s=60)


def test_an_export_arrives_whole_with_a_card_without_paths(site, run, tmp_path):
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
        "| ![](samples/0000.png) | a \\| &lt;b>red&lt;/b> circle | 1000001 |",
        "path: digits",
    ):
        assert part in text
    assert "time/step" not in text
    assert Path(hf_hub_download(REPO, "adapter_config.json")).read_text() == "{}"


def test_a_hub_that_refuses_is_a_warning_with_the_command_that_sends_it_later(site, run, caplog, monkeypatch):
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
        assert sentence.endswith(f"To upload it, run: hf upload {REPO} '{lora}' . --private")
    assert site.commits == []


def test_what_is_shared_of_a_recipe():
    values = {"a": ["/data/x", "owner/name", 3], "reward": {"endpoint": "tcp://host:1", "name": "color"}, "b": "~/y"}
    assert remove_private_values(values) == {"a": ["x", "owner/name", 3], "reward": {"name": "color"}, "b": "y"}
    lines = 'pipe.transformer.load_state_dict(load_file("/out/lora/modules_to_save.safetensors"), strict=False)'
    assert hub_loading_lines(lines, Path("/out/lora"), Path("/base"), REPO).splitlines() == [
        "from huggingface_hub import hf_hub_download",
        "pipe.transformer.load_state_dict(load_file("
        f'hf_hub_download("{REPO}", "modules_to_save.safetensors")), strict=False)',
    ]
