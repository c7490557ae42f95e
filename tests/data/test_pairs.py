import json

import pytest
from PIL import Image

from each_case import check_each
from folders import encode_image, write_tar
from wfm_ds.data.datasets import find_usable_samples
from wfm_ds.data.order import BatchSource
from wfm_ds.data.pixels import Framing
from wfm_ds.data.preference_pairs import PairShards, PairTable
from wfm_ds.data.sample_sets import build_sample_set
from wfm_ds.errors import DataError, RecipeError
from wfm_ds.recipe import file as recipe_file

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}


def png(colour):
    return encode_image(COLOURS[colour])


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "media").mkdir()
    for colour in COLOURS:
        (tmp_path / "media" / f"{colour}.png").write_bytes(png(colour))
    return tmp_path


def table(folder, *lines):
    path = folder / "pairs.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def pair(winner, loser, **keys):
    return {"prompt": f"all {winner}", "chosen": f"media/{winner}.png", "rejected": f"media/{loser}.png", **keys}


def test_a_table_is_read_with_paths_relative_to_it(folder):
    lines = [pair("red", "blue", score=3), "", pair("green", "red", id="mine", negative_prompt="grey")]
    samples = PairTable(table(folder, *lines, pair("blue", "red", id=7)), max_bad_fraction=0).samples
    seventh, first, mine = samples
    assert PairTable(table(folder, '{"id": 1,\r' + json.dumps(pair("red", "blue"))[1:]), max_bad_fraction=0).samples
    assert seventh.id == "7"
    assert first.id == "media/red.png > media/blue.png"
    assert [media.path for media in first.all_media] == [folder / "media" / f"{c}.png" for c in ("red", "blue")]
    assert (first.prompt.id, first.prompt.text, first.prompt.metadata) == (first.id, "all red", {"score": 3})
    assert (mine.id, mine.prompt.negative_text, mine.prompt.metadata) == ("mine", "grey", {})
    assert mine.all_media[1] == first.media


def test_ids_do_not_depend_on_the_order_of_lines(folder):
    lines = [pair("red", "blue"), pair("green", "blue"), pair("blue", "red")]
    ids = [sample.id for sample in PairTable(table(folder, *lines), max_bad_fraction=0).samples]
    assert ids == [sample.id for sample in PairTable(table(folder, *lines[::-1]), max_bad_fraction=0).samples]
    assert ids == sorted(ids)


@check_each(
    ("line", "reason"),
    [
        ("{", "no_prompt"),
        ("[1]", "no_prompt"),
        ({"chosen": "media/red.png", "rejected": "media/blue.png"}, "no_prompt"),
        (pair("red", "blue", prompt=" "), "no_prompt"),
        ({"prompt": "a", "chosen": "media/red.png"}, "no_pair"),
        (pair("red", "grey"), "no_pair"),
        (pair("red", "blue", rejected="media/notes.txt"), "no_pair"),
        (pair("red", "blue", rejected=7), "no_pair"),
        (pair("red", "blue", rejected="media/blue.png\0"), "no_pair"),
        (pair("red", "blue", rejected="media/../media/red.png"), "no_pair"),
        (pair("green", "blue"), "ambiguous"),
        (pair("red", "blue", id="media/green.png > media/blue.png"), "ambiguous"),
    ],
)
def test_a_bad_line_is_counted_by_its_place_and_left_out(folder, line, reason):
    path = table(folder, pair("green", "blue"), line)
    found = PairTable(path, max_bad_fraction=0.5)
    assert found.bad == {reason: [f"{path}:2"]}
    assert len(found.samples) == 1
    with pytest.raises(DataError, match=r"pairs.jsonl:2 .*data.max_bad_fraction|data.max_bad_fraction.*pairs.jsonl:2"):
        PairTable(path, max_bad_fraction=0.4)


def test_a_table_that_is_missing_or_empty_is_refused(folder):
    with pytest.raises(DataError, match=r"none\.jsonl cannot be read"):
        PairTable(folder / "none.jsonl", max_bad_fraction=0)
    with pytest.raises(DataError, match="is empty"):
        PairTable(table(folder, "", " "), max_bad_fraction=0)


def test_shards_have_two_columns(tmp_path):
    caption = json.dumps({"prompt": "all red"}).encode()
    shard = write_tar(
        tmp_path / "00.tar",
        {
            "a.chosen.png": png("red"),
            "a.json": caption,
            "a.rejected.png": png("blue"),
            "b.chosen.png": png("green"),
            "b.rejected.png": png("red"),
            "b.txt": b"all green",
            "c.chosen.png": png("green"),
            "c.json": caption,
            "d.chosen.png": png("green"),
            "d.chosen.webp": png("green"),
            "d.rejected.png": png("red"),
            "d.json": caption,
            "e.chosen.png": png("green"),
            "e.rejected.png": png("red"),
            "notes.txt": b"about this shard",
        }.items(),
    )
    found = PairShards([str(shard)], cache_dir=None, max_bad_fraction=0.9)
    assert [sample.id.split("/")[-1] for sample in found.samples] == ["a", "b"]
    names = {reason: [name.split("#")[1] for name in names] for reason, names in found.bad.items()}
    assert names == {"no_pair": ["c", "notes"], "ambiguous": ["d"], "no_json": ["e"]}
    chosen, rejected = found.samples[0].all_media
    assert (chosen.suffix, rejected.suffix) == (".png", ".png")
    assert (chosen.name, rejected.name) == (f"{shard}#a.chosen.png", f"{shard}#a.rejected.png")
    with rejected.open() as file:
        assert file.read() == png("blue")


def source(samples, **options):
    settings = {"global_batch": 2, "seed": 0, "shuffle": False, "framings": [Framing(height=8, width=8)]}
    return BatchSource(samples, **settings, max_bad_fraction=0.5, **options)


def test_both_media_of_a_pair_are_cut_alike(folder):
    for name, colour in (("wide", "red"), ("high", "blue")):
        size = (32, 8) if name == "wide" else (8, 32)
        Image.new("RGB", size, COLOURS[colour]).save(folder / "media" / f"{name}.png")
    path = table(folder, pair("wide", "high"), pair("red", "wide"))
    batches = source(PairTable(path, max_bad_fraction=0).samples)
    first, second = batches.read_batch(1, 0, 1)
    assert first.pixels.shape == first.rejected.pixels.shape == (8, 8, 3)
    assert (second.rejected.sample_id, second.rejected.position) == (second.sample_id, second.position)
    assert second.rejected.prompt == second.prompt
    assert second.rejected.rejected is None
    batches.close()


@pytest.mark.parametrize("role", [0, 1])
def test_a_pair_of_which_one_is_broken_is_replaced_whole_and_counted_by_its_name(folder, role):
    pairs = [["red", "blue"], ["green", "red"], ["blue", "green"]]
    (folder / "media" / "broken.png").write_bytes(b"not a picture")
    pairs[1][role] = "broken"
    samples = PairTable(table(folder, *(pair(*names) for names in pairs)), max_bad_fraction=0).samples
    batches = source(samples, workers=1)
    seen = [item for step in (1, 2) for item in batches.read_batch(step, 0, 1)]
    batches.close()
    assert batches.bad["decode"] >= 1
    assert list(batches.state()["logged"]) == [str(folder / "media" / "broken.png")]
    for item in seen:
        assert item.rejected is not None
        assert "broken" not in item.sample_id


def test_a_check_tries_both_media(folder, root):
    (folder / "media" / "broken.png").write_bytes(b"not a picture")
    samples = PairTable(table(folder, pair("red", "broken")), max_bad_fraction=0).samples
    recipe = recipe_file.load_recipe(root / "tests" / "recipes" / "sd3_dpo.yaml")
    buckets = type("Buckets", (), {"choose_framing": lambda self, media: Framing(height=8, width=8)})()
    with pytest.raises(DataError, match=r"all 1 pairs are invalid.*broken.png"):
        find_usable_samples(samples, recipe, buckets, 3, dataset_size=1, what="pairs")


@check_each(
    ("name", "overrides", "message"),
    [
        ("sd3_sft", ["data.kind=pairs", "data.path=p.jsonl"], "algorithm sft needs captioned images or videos"),
        ("sd3_nft", ["data.kind=pairs", "data.path=p.jsonl"], "algorithm diffusion_nft needs data.kind: prompts"),
        ("sd3_dpo", ["data.kind=paired", "data.path=p"], "algorithm dpo needs data.kind: pairs"),
        ("sd3_dpo", ["data.path=[a.jsonl, b.jsonl]"], "one local .jsonl file, or tar shards: a.jsonl"),
        ("sd3_dpo", ["data.path=s3://bucket/a.jsonl"], "one local .jsonl file, or tar shards"),
    ],
)
def test_pairs_are_for_algorithms_that_compare(name, overrides, message, root):
    with pytest.raises(RecipeError, match=message):
        recipe_file.load_recipe(root / "tests" / "recipes" / f"{name}.yaml", overrides)


OWN = """
from pathlib import Path
from wfm_ds.data.samples import LocalFile, Sample, SampleSet
from wfm_ds.types import Prompt

class Mine(SampleSet):
    def __init__(self, paths, *, max_bad_fraction, paired):
        super().__init__("mine")
        files = [LocalFile(Path(name)) for name in ("a.png", "b.png")]
        other = files[1] if paired else None
        self.samples.append(Sample(id="0", media=files[0], rejected=other, prompt=Prompt(id="0", text="a")))
"""


@pytest.mark.parametrize(("name", "paired"), [("sd3_dpo", False), ("sd3_sft", True)])
def test_an_own_kind_of_the_other_sort_is_refused(tmp_path, monkeypatch, root, name, paired):
    from wfm_ds.data.datasets import load_data

    (tmp_path / "own_pairs.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["data.kind=own_pairs:Mine", f"data.options={{paired: {str(paired).lower()}}}"]
    recipe = recipe_file.load_recipe(root / "tests" / "recipes" / f"{name}.yaml", words)
    with pytest.raises(DataError, match=r"mine: this algorithm needs 0 to be (a pair|a single image or video)"):
        load_data(recipe)
    assert build_sample_set(recipe.data, ["x"]).samples
