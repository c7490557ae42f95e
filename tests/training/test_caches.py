"""Disk caches of a recipe: exactly the entries that its run needs, each computed by one rank only."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from wfm_ds.data.datasets import build_buckets, load_data
from wfm_ds.data.media import load_media
from wfm_ds.data.order import BatchSource, PromptOrder
from wfm_ds.data.pixels import draw_centre
from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.distributed.world import World
from wfm_ds.errors import DataError, RecipeError
from wfm_ds.models.base import NegativeText
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.run_sizes import derive_run_sizes
from wfm_ds.runs.model_loading import load_model
from wfm_ds.training.caches import (
    CacheFiller,
    CaptionEmbeddingFile,
    collect_run_texts,
    drop_unused_encoders,
    open_latent_cache,
    open_text_cache,
    precompute_texts,
)

CPU = torch.device("cpu")


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for i in range(7):
        Image.fromarray(np.random.default_rng(i).integers(0, 256, (32, 40, 3), np.uint8)).save(folder / f"{i}.png")
        (folder / f"{i}.json").write_text(json.dumps({"prompt": f"shade {i % 3}"}))
    return folder


@pytest.fixture
def sft(tmp_path, root, tiny_pipelines, images):
    def recipe(*overrides):
        return recipe_file.load_recipe(
            root / "tests" / "recipes" / "sd3_sft.yaml",
            [
                f"run.output_dir={tmp_path / 'out'}",
                f"model.path={tiny_pipelines('sd3')}",
                f"data.path={images}",
                f"data.cache_dir={tmp_path / 'cache'}",
                "data.cache_latents=true",
                "data.clip=centre",
                "data.max_bad_fraction=0.3",
                *overrides,
            ],
        )

    return recipe


def filled(recipe, model, data, ranks):
    return [CacheFiller(recipe, model, data, rank, ranks).fill_caches() for rank in range(ranks)]


def test_ranks_split_the_work_and_nothing_is_computed_twice(sft):
    recipe = sft("validation.num_prompts=2")
    model, data = load_model(recipe, CPU), load_data(recipe)
    texts = {"shade 0", "shade 1", "shade 2", NegativeText("")}
    assert set(collect_run_texts(recipe, model, data)) == texts
    counts = filled(recipe, model, data, 3)
    assert sum(c["new"] for c in counts) == len(texts) + 7
    assert max(c["new"] for c in counts) <= 5
    assert [c["kept"] + c["bad"] for c in counts] == [0, 0, 0]
    (again,) = filled(recipe, model, data, 1)
    assert again == {"new": 0, "kept": len(texts) + 7, "bad": 0}
    cache = open_text_cache(recipe, model, data)
    num_advances = LIVENESS.num_advances
    assert drop_unused_encoders(model, cache, texts)
    assert LIVENESS.num_advances == num_advances + len(texts)
    assert model.components_with_prefix("text_encoder") == {}
    cache.encode(list(texts))


def encode_texts_on_a_node(recipe, folder):
    """Encode the texts of a run as the only rank of a node of torchrun, with the node's cache in FOLDER/RANK.

    Returns the number of texts and how many are in this node's cache.
    """
    del os.environ["LOCAL_SIZE"]  # torchrun does not set it
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    world = World.join()
    recipe = recipe_file.load_recipe(Path(recipe), [f"data.cache_dir={folder}/{world.rank}"])
    model, data = load_model(recipe, CPU), load_data(recipe)
    cache = precompute_texts(recipe, model, data, derive_run_sizes(recipe, world.size), world)
    texts = collect_run_texts(recipe, model, data)
    return len(texts), sum(map(cache.is_stored, texts))


def test_each_of_two_nodes_encodes_all_texts_into_its_own_cache(sft, two_ranks, tmp_path):
    (tmp_path / "recipe.yaml").write_text(recipe_file.dump_recipe(sft()))
    nodes = two_ranks.run(encode_texts_on_a_node, recipe=str(tmp_path / "recipe.yaml"), folder=str(tmp_path / "caches"))
    assert nodes == [(4, 4)] * 2


def test_encoders_are_kept_while_a_text_is_missing(sft):
    recipe = sft()
    model, data = load_model(recipe, CPU), load_data(recipe)
    seen = []

    class Texts(list):
        def __iter__(self):
            for text in super().__iter__():
                seen.append(text)
                yield text

    needed = Texts(["shade 0", "shade 1"])
    assert not drop_unused_encoders(model, open_text_cache(recipe, model, data), needed)
    assert seen == ["shade 0"]  # the check stops at the first missing text
    assert not drop_unused_encoders(
        model, open_text_cache(sft("data.cache_dir=null", "data.cache_latents=false"), model, data), ["x"]
    )
    assert len(model.components_with_prefix("text_encoder")) == 3


def test_guidance_needs_its_negative_texts(sft, root, tiny_pipelines, tmp_path):
    recipe = sft("sampling.guidance_scale=3", "sampling.negative_prompt=blurry", "data.caption_dropout=0")
    model = load_model(recipe, CPU)
    negatives = [t for t in collect_run_texts(recipe, model, load_data(recipe)) if isinstance(t, NegativeText)]
    assert negatives == [NegativeText("blurry")]
    shown = tmp_path / "shown.txt"
    shown.write_text("a thing that is shown\n")
    rl = recipe_file.load_recipe(
        root / "tests" / "recipes" / "sd3_nft.yaml",
        [
            f"model.path={tiny_pipelines('sd3')}",
            f"data.path={root / 'recipes' / 'prompts' / 'colors'}",
            "sampling.guidance_scale=2",
            f"run.output_dir={tmp_path / 'rl'}",
            "run.steps=2",
            "run.seed=7",
            "rollout.prompts_per_step=3",
            "validation.num_prompts=1",
            f"validation.prompts={shown}",
        ],
    )
    data = load_data(rl)
    drawn = {p.text for step in (1, 2) for p in PromptOrder(data.prompts, seed=7, shuffle=True).step_prompts(step, 3)}
    assert set(collect_run_texts(rl, model, data)) == {*drawn, "a thing that is shown", NegativeText("")}
    assert len(drawn) == 6 < len(data.prompts)
    spread = rl.model_copy(update={"data": rl.data.model_copy(update={"choose": "reward_std"})})
    assert set(collect_run_texts(spread, model, data)) >= {p.text for p in data.prompts}
    many = rl.model_copy(update={"run": rl.run.model_copy(update={"steps": 1000})})
    assert set(collect_run_texts(many, model, data)) >= {p.text for p in data.prompts}


def test_cached_latents_replace_decoding_and_encoding(sft, images):
    recipe = sft()
    model, data = load_model(recipe, CPU), load_data(recipe)
    cache, (frames,) = open_latent_cache(recipe, model), build_buckets(recipe, model).framings
    filled(recipe, model, data, 1)
    source = BatchSource(
        data.samples,
        global_batch=4,
        seed=0,
        shuffle=True,
        framings=[frames],
        max_bad_fraction=0.0,
        cached_latents=cache.read,
    )
    try:
        for sample in source.read_batch(1, 0, 1):
            assert sample.pixels is None
            want = model.encode_uint8([load_media(sample.media, frames, draw_centre)])[0]
            torch.testing.assert_close(sample.latents, want, rtol=0, atol=0)
    finally:
        source.close()
    (changed,) = [s for s in data.samples if s.id == data.samples[0].id]
    Image.new("RGB", (32, 32), "red").save(changed.media.path)
    assert cache.read(changed.media, frames) is None
    assert cache.read(data.samples[1].media, frames) is not None
    larger = build_buckets(sft("sampling.height=32", "sampling.width=32"), model).framings[0]
    assert cache.read(data.samples[1].media, larger) is None


def test_bad_media_are_counted_up_to_the_limit(sft, images):
    recipe = sft()
    model = load_model(recipe, CPU)
    for number in (2, 5):
        (images / f"{number}.png").write_bytes(b"")
    data = load_data(recipe)
    (counts,) = filled(recipe, model, data, 1)
    assert (counts["bad"], counts["new"]) == (2, 4 + 5)
    with pytest.raises(DataError, match=r"2 images or videos are unreadable, more than data\.max_bad_fraction 0\.2 "):
        filled(sft("data.max_bad_fraction=0.2"), model, data, 1)


def test_each_bucket_size_has_its_own_latents(sft, images):
    Image.new("RGB", (32, 64), "red").save(images / "1.png")
    recipe = sft("data.buckets=[[16, 16], [32, 16]]", "validation.holdout=0")
    model, data = load_model(recipe, CPU), load_data(recipe)
    filled(recipe, model, data, 2)
    cache, (square, upright) = open_latent_cache(recipe, model), build_buckets(recipe, model).framings
    for sample in data.samples:
        here, elsewhere = (upright, square) if sample.id == "1" else (square, upright)
        assert cache.read(sample.media, here).shape == (4, here.height // 2, here.width // 2)
        assert cache.read(sample.media, elsewhere) is None
    (again,) = filled(recipe, model, data, 1)
    assert again["new"] == 0


@pytest.mark.parametrize("override", ["data.cache_dir=null", "data.crop=random", "data.clip=random"])
def test_latents_that_differ_each_epoch_cannot_be_cached(sft, override):
    with pytest.raises(RecipeError, match="cache_latents needs cache_dir, clip: centre and crop: centre"):
        sft(override)


def test_an_embedding_file_holds_one_matrix(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"prompt_embeds": torch.ones(3, 4, dtype=torch.bfloat16)}, path)
    assert torch.equal(CaptionEmbeddingFile(path).load(), torch.ones(3, 4, dtype=torch.bfloat16))
    for tensors in ({"a": torch.ones(3)}, {"a": torch.ones(3, 4), "b": torch.ones(3, 4)}):
        save_file(tensors, path)
        with pytest.raises(DataError, match=r"must hold exactly one tensor \[tokens, embedding size\]"):
            CaptionEmbeddingFile(path).load()
    path.write_bytes(b"short")
    with pytest.raises(DataError, match="cannot be read"):
        CaptionEmbeddingFile(path).load()
