"""`wfm fetch`: the model, prompts and reward weights of a recipe, from a local Hub and a local server."""

import io
import logging
import os
import re
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from huggingface_hub import constants

from commands import wfm_command
from hub_server import Repo, files_of, hub_server, use
from lerobot import FRONT, record, write_lerobot
from prompt_server import prompt_server, served_files, use_test_source
from wfm_ds.data.prompt_sources import MIRROR
from wfm_ds.data.prompts import load_prompts
from wfm_ds.models import registry
from wfm_ds.models.assets import hub
from wfm_ds.recipe.file import load_recipe
from wfm_ds.runs import fetch_plan
from wfm_ds.storage.filesystem import is_repo_id
from wfm_reward import registry as registry_of_rewards
from wfm_reward.rewards.clipscore import ClipScore

main = wfm_command("fetch")
MODEL = "stabilityai/stable-diffusion-3.5-medium"
PICKSCORE, CLIP = "yuvalkirstain/PickScore_v1", "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
WORDS = ["sd3_nft", "model.revision=null", "reward.functions=[{name: ocr}, {name: pickscore}]"]
UNUSED = {"README.md": b"# card", "sd3.5_medium.safetensors": b"x" * 99, "transformer/model.bin": b"x" * 99}
CLIP_FILES = {
    **{name: name.encode() for name in ["config.json", "vocab.json", "merges.txt", "preprocessor_config.json"]},
    **dict.fromkeys(["pytorch_model.bin", "open_clip_model.safetensors", "tf_model.h5"], b"x" * 99),
}


@pytest.fixture
def site(tmp_path, tiny_pipelines, monkeypatch):
    """Serve the model and reward weights of `WORDS`, and the prompts. The local cache is empty."""
    with hub_server() as hub, prompt_server(served_files()) as prompts:
        hub.repos[MODEL] = Repo(
            files_of(tiny_pipelines("sd3")) | UNUSED, card={"license": "other", "license_name": "x"}
        )
        hub.repos[PICKSCORE] = Repo(CLIP_FILES | {"model.safetensors": b"w" * 50}, card={"license": "mit"})
        hub.repos[CLIP] = Repo(CLIP_FILES | {"model.safetensors": b"w" * 50})
        use(monkeypatch, url=hub.url, cache=tmp_path / "cache")
        use_test_source(monkeypatch, prompts.url)
        monkeypatch.chdir(tmp_path)
        hub.prompts = prompts
        yield hub


def cache_name(repo):
    return "models--" + repo.replace("/", "--")


def fetch(*words):
    return main([*WORDS, *words])


def test_a_recipe_is_complete_after_one_command(site, capsys, tmp_path, monkeypatch):
    assert fetch("--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(", ")[0] for line in lines[:4]] == [
        f"model: {MODEL} @ {site.repos[MODEL].commit[:7]}",
        "prompts: ocr of github.com/somebody/prompts",
        f"pickscore: {PICKSCORE} @ {site.repos[PICKSCORE].commit[:7]}",
        f"pickscore: {CLIP} @ {site.repos[CLIP].commit[:7]}",
    ]
    assert [line.split("licence ")[1].split(",")[0] for line in lines[:4]] == ["x", "MIT", "mit", "not stated"]
    assert [line.split(": ")[0] for line in lines[5:]] == [f"free in {tmp_path / 'cache'}", "free in datasets/ocr"]
    assert site.sent == ["model_index.json"]
    assert fetch("--yes") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "next: wfm check " + " ".join(
        ["sd3_nft", "model.revision=null", "'reward.functions=[{name: ocr}, {name: pickscore}]'"]
    )
    assert not {"README.md", "sd3.5_medium.safetensors", "transformer/model.bin", "pytorch_model.bin"} & set(site.sent)
    assert site.sent.count("model.safetensors") == 1  # of PickScore; only the processor of the other repository
    assert site.sent.count("vocab.json") == 2
    # Now nothing needs a network.
    site.prompts.files.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load_prompts(Path("datasets/ocr"), "ocr", "train")[0].text.startswith("A sign")
    assert registry.resolve_pipeline(MODEL).is_dir()
    capsys.readouterr()
    assert fetch() == 0
    assert capsys.readouterr().out.startswith("nothing to download; next: wfm check sd3_nft")


def branch_commits():
    """Return the commit of the branch main of each repository in the cache."""
    return {path.parent.parent.name: path.read_text() for path in Path("cache").glob("*/refs/main")}


def test_without_a_network_the_cache_is_enough_and_the_missing_files_are_one_line(site, capsys, monkeypatch, tmp_path):
    assert fetch("--yes") == 0
    commits = branch_commits()
    assert len(commits) == 3
    for name in site.repos:  # the branches move on
        site.repos[name].files["new.json"] = b"{}"
    monkeypatch.setattr(sys, "stdin", answers := io.StringIO("n\n"))
    answers.isatty = lambda: True
    assert fetch("--dry-run") == 0
    assert fetch() == 2
    assert "nothing was downloaded" in capsys.readouterr().err
    assert branch_commits() == commits, "offline runs would miss the files of the new commits"
    for no_network in ({"offline": True}, {"url": "http://127.0.0.1:9"}):  # nothing listens on this port
        use(monkeypatch, cache=tmp_path / "cache", **{"url": site.url, **no_network})
        assert fetch() == 0
        assert capsys.readouterr().out.startswith("nothing to download"), no_network
    use(monkeypatch, url=site.url, cache=tmp_path / "cache", offline=True)
    for folder in Path("cache").glob("*/trees"):  # as in a cache that another program has filled
        shutil.rmtree(folder)
    assert fetch() == 0
    vae = "vae/diffusion_pytorch_model.safetensors"
    for repo, name in ((MODEL, vae), (PICKSCORE, "model.safetensors"), (CLIP, "preprocessor_config.json")):
        Path("cache", cache_name(repo), "snapshots", commits[cache_name(repo)], name).unlink()
    assert error_of(capsys).endswith(
        f"lacks files of model {MODEL}, reward pickscore ({PICKSCORE}), reward pickscore ({CLIP}): repeat the command "
        "when there is a network (and HF_HUB_OFFLINE is not set)"
    )
    use(monkeypatch, url=site.url, cache=tmp_path / "cache")
    assert fetch("--yes") == 0
    assert branch_commits() == {cache_name(name): repo.commit for name, repo in site.repos.items()}


def test_a_download_continues_after_a_lost_connection(site, capsys, monkeypatch):
    words = ["reward.functions=[{name: ocr}]", "data={kind: prompts, path: .}"]
    answers = SimpleNamespace(isatty=lambda: True, readline=lambda: site.dropped.add("revision") or "y\n")
    monkeypatch.setattr(sys, "stdin", answers)
    assert fetch(*words) == 2
    line = capsys.readouterr().err
    assert re.fullmatch(r"error: the connection to the Hub was lost \(\w+: .*\): repeat the command, .* of .*\n", line)
    site.dropped.add("resolve")
    pinned = f"model.revision={site.repos[MODEL].commit}"
    assert f"/cache lacks files of model {MODEL}: repeat the command when" in error_of(capsys, *words, pinned)
    site.dropped.clear()
    assert fetch(*words, "--yes") == 0
    assert registry.resolve_pipeline(MODEL).is_dir()


def test_a_download_needs_an_answer(site, capsys, monkeypatch):
    words = ["model.path=tiny:sd3", "reward.functions=[{name: ocr}]"]
    assert fetch(*words) == 2
    assert "stdin is not a terminal: add --yes or --dry-run" in capsys.readouterr().err
    answers = io.StringIO("n\ny\n")
    answers.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", answers)
    assert fetch(*words) == 2
    assert "nothing was downloaded" in capsys.readouterr().err
    assert not Path("datasets").exists()
    assert fetch(*words) == 0
    assert Path("datasets/ocr/train.txt").is_file()


def test_a_long_download_without_a_terminal_shows_its_bytes_and_the_remaining_time(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # wfm fetch sets up no logging
    monkeypatch.setattr(hub, "PROGRESS_INTERVAL_S", 0.01)
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots" / "c").mkdir(parents=True)
    done, partial = tmp_path / "snapshots" / "c" / "first", tmp_path / "blobs" / "x.incomplete"
    files = [
        hub.DryRunFileInfo("c", size, name, str(done.with_name(name)), is_cached=False, will_download=True)
        for name, size in (("first", 1_000_000_000), ("second", 2_000_000_000))
    ]
    expected = [r"0.0 of 3.0 GB\n", r"1.5 of 3.0 GB, \d:\d\d left\n"]
    with hub.hide_bars_without_terminal(), hub.log_download_progress("model a/b", files):
        for text in expected:
            err, deadline_s = "", time.monotonic() + 10
            while not re.search(f"model a/b: still downloading, {text}", err) and time.monotonic() < deadline_s:
                err += capsys.readouterr().err
            assert re.search(f"model a/b: still downloading, {text}", err), err
            done.touch()
            partial.touch()
            os.truncate(partial, 500_000_000)  # sparse


def error_of(capsys, *words):
    assert fetch("--yes", *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_files_that_cannot_be_downloaded_are_one_line_errors(site, capsys, monkeypatch):
    with monkeypatch.context() as full_disk:
        full_disk.setattr(fetch_plan.shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
        assert re.search(r"needs 0\.0 GB, but 0\.0 GB are free: free some, or set HF_HOME", error_of(capsys))
    with monkeypatch.context() as no_network:
        no_network.setattr(constants, "HF_HUB_OFFLINE", True)
        assert f"lacks files of model {MODEL}, reward pickscore ({PICKSCORE})" in error_of(capsys)
        no_network.setenv(MIRROR, "http://127.0.0.1:9")
        assert "train.txt cannot be downloaded" in error_of(capsys, "model.path=tiny:sd3")
    site.repos[MODEL].refusal = (403, "GatedRepo")
    assert f"open https://huggingface.co/{MODEL}, accept it, then run hf auth login" in error_of(capsys)
    assert "reward pickscore: nowhere/at/all does not exist" in error_of(
        capsys, "model.path=tiny:sd3", "reward.functions=[{name: pickscore, options: {model: nowhere/at/all}}]"
    )


def test_parts_that_it_cannot_download_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["sd3_image_sft", "model.path=models/none"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "model: models/none does not exist; model.path must be a local diffusers pipeline folder, owner/name on the "
        "Hub, or tiny:FAMILY",
        "data.path datasets/images does not exist, and wfm fetch does not download it (docs/data.md, docs/prompts.md)",
        "nothing to download; next: wfm check sd3_image_sft model.path=models/none",
    ]
    local = ["model.path=tiny:wan21", "data={kind: prompts, path: .}"]
    assert main(["wan_video_nft", *local]) == 0
    assert "the service at outputs" in capsys.readouterr().out
    spawned = ["reward.spawn=true", "reward.endpoint=null", "validation.held_out_rewards=[hpsv3]"]
    assert main(["wan_video_nft", *local, *spawned]) == 0
    assert "reward hpsv3: the package hpsv3 downloads its weights" in capsys.readouterr().out


def test_lerobot_data_on_the_hub_is_complete_after_one_command(site, capsys, tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    write_lerobot(tmp_path / "arm", "v3.0", record(tmp_path / "recorded", (9, 9, 9)), per_file=1)
    repo = Repo(files_of(tmp_path / "arm"), card={"license": "mit"})
    site.repos |= {"owner/arm": repo, "owner/held_out": repo}
    words = ["sd3_image_sft_lora", "model.path=tiny:wan21", "data={kind: lerobot, path: owner/arm, episodes: ':1'}"]
    words += ["validation.path=owner/held_out", "validation.episodes=':1'"]
    used = ["data/chunk-000/file-000.parquet", f"videos/{FRONT}/chunk-000/file-000.mp4"]
    plan = fetch_plan.plan_downloads(load_recipe(Path(words[0]), words[1:]))
    num_bytes = sum(len(repo.files[name]) for name in used)
    assert [(item.purpose, item.num_bytes, item.licence) for item in plan.items] == [("data", num_bytes, "mit")] * 2
    assert not any(name.startswith(("data/", "videos/")) for name in site.sent)
    assert not branch_commits()
    assert main([*words, "data.options={revision: v9}"]) == 2
    assert "owner/arm has no branch, tag or commit v9: change data.options.revision" in capsys.readouterr().err
    assert main([*words, "--yes"]) == 0
    assert [name for name in sorted(site.sent) if not name.startswith("meta/")] == sorted(2 * used)
    use(monkeypatch, url=site.url, cache=tmp_path / "cache", offline=True)
    sets = "data={kind: sets, path: ., sets: [{kind: lerobot, path: owner/arm, episodes: '1:'}]}"
    for data, is_complete in ((words[2], True), (sets, False)):
        capsys.readouterr()
        assert main([*words[:2], data, "validation.every=0"]) == (0 if is_complete else 2)
        shown = capsys.readouterr()
        assert ("nothing to download" in shown.out, "lacks files of data owner/arm: " in shown.err) == (
            is_complete,
            not is_complete,
        )


class Misspelled(ClipScore):
    """A user's reward with a mistake in `hub_files`."""

    hub_files: ClassVar = {"modle": "model"}


def test_files_that_are_not_published_are_named_and_cause_no_download(site, capsys):
    words = ["model.path=tiny:sd3", "reward.functions=[{name: ocr}]"]
    assert fetch(*words, "data.split=mine", "--dry-run") == 0
    assert "data.split mine: the published prompt set ocr has no file mine.txt" in capsys.readouterr().out
    assert fetch(*words, "--yes") == 0
    capsys.readouterr()
    assert fetch(*words, "validation.prompts=datasets/ocr/mine.txt") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("validation.prompts datasets/ocr/mine.txt does not exist, and wfm fetch does not")
    assert out[1].startswith("nothing to download")
    assert site.sent == []
    name = f"{Misspelled.__module__}:Misspelled"
    assert "hub_files of the class names modle, which is not an option" in error_of(
        capsys, words[0], f"reward.functions=[{{name: '{name}'}}]"
    )
    assert main(["sd3_image_sft", words[0], "data={kind: hf, path: a/b}", "validation.path=held_out"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("validation.path held_out does not exist")
    assert out[1].startswith("data.path a/b: the package datasets downloads")
    assert main(["sd3_image_sft", words[0], "data={kind: hf, path: a/b}", "validation.path=a/c"]) == 0
    keys = [line.partition(": ")[0] for line in capsys.readouterr().out.splitlines()[:2]]
    assert keys == ["data.path a/b", "validation.path a/c"]


def test_every_option_that_names_hub_files_exists():
    for name in registry_of_rewards.list_reward_names():
        reward = registry_of_rewards.get_reward_class(name)
        defaults = {option: parameter.default for option, parameter in reward.option_parameters().items()}
        for option, kind in reward.hub_files.items():
            repo, _, file = defaults[option].partition(":")
            assert is_repo_id(repo)
            assert bool(file) == (kind == "file")
