"""All texts are encoded before the engine is built and the encoders are freed; if not, the log says why."""

import logging
import os
import time

import pytest
import torch

from wfm_ds.data.datasets import load_data
from wfm_ds.distributed.world import World
from wfm_ds.errors import DataError
from wfm_ds.models.assets import text_cache
from wfm_ds.models.assets.text_cache import TextCache
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.run_sizes import derive_run_sizes
from wfm_ds.runs.model_loading import load_model
from wfm_ds.training import caches
from wfm_ds.training.caches import collect_run_texts, precompute_objection, precompute_texts

CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WFM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def alone():
    return World(0, 1, 0, CPU, None)


@pytest.fixture
def run(tmp_path, root, tiny_pipelines, alone, cache):
    """Return `run(*overrides)`, which gives the recipe, model, data and text cache at the start of a run."""

    def begin(*overrides):
        settings = [
            f"run.output_dir={tmp_path / 'out'}",
            f"model.path={tiny_pipelines('sd3')}",
            f"data.path={root / 'recipes' / 'prompts' / 'colors'}",
        ]
        recipe = recipe_file.load_recipe(root / "tests" / "recipes" / "sd3_nft.yaml", [*settings, *overrides])
        model, data = load_model(recipe, CPU), load_data(recipe)
        return recipe, model, data, precompute_texts(recipe, model, data, derive_run_sizes(recipe, 1), alone)

    return begin


def test_the_default_cache_is_filled_and_the_encoders_are_freed(run, cache, caplog):
    caplog.set_level(logging.INFO)
    recipe, model, data, texts = run()
    needed = collect_run_texts(recipe, model, data)
    assert model.components_with_prefix("text_encoder") == {}
    assert texts.folder.parent == cache / "text"
    assert f"all {len(needed)} texts are cached in {texts.folder}" in caplog.text
    plain = TextCache(load_model(recipe, CPU))
    for text in needed:
        for name, row in plain.encode([text]).items():
            torch.testing.assert_close(texts.encode([text])[name], row, rtol=0, atol=0)
    caplog.clear()
    _, again, _, _ = run()
    assert again.components_with_prefix("text_encoder") == {}
    assert "encoded " not in caplog.text


def test_without_the_cache_texts_are_encoded_when_needed(run, cache):
    _, model, _, texts = run("data.cache_text=off")
    assert len(model.components_with_prefix("text_encoder")) == 3
    assert texts.folder is None
    assert not cache.exists()


def test_a_cache_folder_of_the_user_is_filled_too(run, cache, tmp_path):
    _, model, _, texts = run(f"data.cache_dir={tmp_path / 'own'}")
    assert model.components_with_prefix("text_encoder") == {}
    assert texts.folder == tmp_path / "own" / "text"
    assert not cache.exists()


def test_with_too_many_texts_the_encoders_are_kept(run, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(caches, "MAX_EMBEDDING_BYTES", 1000)
    recipe, model, data, _ = run()
    assert len(model.components_with_prefix("text_encoder")) == 3
    assert "set data.cache_dir and run wfm data prepare" in caplog.text
    monkeypatch.setattr(caches, "MAX_EMBEDDING_BYTES", 2**30)
    needed = collect_run_texts(recipe, model, data)
    assert precompute_objection(recipe, model, needed, derive_run_sizes(recipe, 1)) is None
    assert "5000 texts but the run draws only 4 samples" in precompute_objection(
        recipe, model, needed * 1000, derive_run_sizes(recipe, 1)
    )


def test_a_cache_that_cannot_be_written_does_not_stop_the_run(run, cache, caplog):
    caplog.set_level(logging.INFO)
    cache.write_text("a file where the folder should be")
    with pytest.raises(Exception, match=r"cannot be written .*: set data\.cache_dir to a writable folder"):
        run(f"data.cache_dir={cache / 'below'}")
    _, model, _, texts = run()
    assert len(model.components_with_prefix("text_encoder")) == 3
    assert "cannot be written" in caplog.text
    assert texts.encode(["a cat"])["prompt_embeds"].shape[0] == 1


def test_the_error_for_a_full_disk_names_the_folder(run, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TextCache, "encode", full)
    with pytest.raises(Exception, match=r"cannot be written: .*No space left.*data\.cache_dir") as caught:
        run()
    assert isinstance(caught.value.__cause__, DataError)


def test_folders_that_no_run_opens_are_removed(cache):
    for name, age_days in {"old": 91, "young": 80}.items():
        folder = cache / "text" / name
        folder.mkdir(parents=True)
        (folder / "entry").touch()
        (folder / text_cache.LAST_USE_FILE).touch()
        then = time.time() - age_days * 86400
        os.utime(folder / text_cache.LAST_USE_FILE, (then, then))
    text_cache.remove_unused_folders(time.time())
    assert [folder.name for folder in (cache / "text").iterdir()] == ["young"]
