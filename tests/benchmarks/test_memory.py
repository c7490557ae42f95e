"""Each shipped recipe states the GPU that it needs, and the estimate with the released model's dimensions agrees."""

import pytest

from benchmarks import memory
from wfm_ds.errors import RecipeError
from wfm_ds.memory.advice import fits_memory
from wfm_ds.monitoring.meters import GIB
from wfm_ds.recipe import file as recipe_file

RECIPES = memory.list_shipped_recipes()


def read_statement(path):
    (found,) = memory.STATEMENT.findall(path.read_text(encoding="utf-8"))
    return tuple(map(int, found))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_states_memory_that_fits(path):
    ranks, gpu_gb, needed_gib = read_statement(path)
    assert ranks == memory.num_gpus(path)
    assert gpu_gb == memory.GPU_GB
    assert fits_memory(needed_gib * GIB, gpu_gb * 10**9)


def choose_marks(path):
    """Mark most cases as `long`, because each takes seconds: .ci/run has one image and one video recipe."""
    often = path.stem in ("sd3_nft", "sana_video_nft")
    return [] if often else [pytest.mark.long]


@pytest.mark.parametrize("path", [pytest.param(p, id=p.stem, marks=choose_marks(p)) for p in RECIPES])
def test_the_statement_is_the_estimate(path):
    assert memory.make_statement(path) in path.read_text(encoding="utf-8").splitlines()


@pytest.mark.long
def test_a_base_in_fewer_bits_saves_its_bytes(monkeypatch):
    monkeypatch.setattr(memory, "PRECISIONS", (None, "fp8", "int8"))
    row = memory.precisions_row(memory.RECIPES / "sd3_nft.yaml", [], 8)
    (plain, peak), *others = [tuple(map(float, cell.split(" of "))) for cell in row.strip("| ").split(" | ")[1:]]
    assert others[0] == others[1]  # both have one byte per weight and one scale per row
    weights, its_peak = others[0]
    assert weights == pytest.approx(plain - 1.3, abs=0.11)  # 1.36e9 weights in blocks
    assert peak - its_peak == pytest.approx(plain - weights, abs=0.11)


def test_a_recipe_of_another_model_is_rejected(root):
    with pytest.raises(RecipeError, match=r"is not in benchmarks/released\.py"):
        memory.estimate_released(recipe_file.load_recipe(root / "tests" / "recipes" / "sd3_nft.yaml", []), 1)
