"""Train on two ranks from the command line, with a Hub pipeline and a folder of images with NAME.txt captions.

The run resumes with the same commit after the branch has changed. A new run without a network fails with a message.
"""

import json

import numpy as np
import pytest
from PIL import Image

from commands import run_module
from hub_server import Repo, files_of, hub_server
from wfm_ds.recipe import file as recipe_file

NAME = "somebody/tiny-sd3"


def train(tmp_path, *words, endpoint, offline="0", ranks=2, code=0):
    common = ["tests/recipes/sd3_sft_lora.yaml", f"model.path={NAME}", f"run.output_dir={tmp_path / 'out'}"]
    data = ["data.kind=folder", f"data.path={tmp_path / 'pictures'}", "validation.every=0"]
    hub = {"HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": offline}
    return run_module("wfm_ds.train", *common, *data, *words, ranks=ranks, code=code, **hub)


@pytest.mark.long
def test_a_resumed_run_keeps_its_commit(tmp_path, tiny_pipelines):
    (tmp_path / "pictures").mkdir()
    for i in range(16):
        pixels = np.random.default_rng(i).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "pictures" / f"{i:02}.png")
        (tmp_path / "pictures" / f"{i:02}.txt").write_text(f"picture {i}\n")
    with hub_server() as hub:
        hub.repos[NAME] = Repo(files_of(tiny_pipelines("sd3")))
        commit = hub.repos[NAME].commit
        done = train(tmp_path, "run.steps=1", "checkpoint.every=1", endpoint=hub.url)
        assert hub.sent.count("transformer/diffusion_pytorch_model.safetensors") == 1
        assert recipe_file.load_recipe(tmp_path / "out" / "recipe.yaml").model.revision == commit
        assert f'from_pretrained("{NAME}", revision="{commit}"' in "".join((done.stdout + done.stderr).split("\n"))
        # The branch changes. A new run would use the new commit, but the resumed run does not query the Hub.
        hub.repos[NAME].files["README.md"] = b"changed"
        num_sent = len(hub.sent)
        train(tmp_path, "run.steps=2", "checkpoint.every=1", endpoint=hub.url)
        assert len(hub.sent) == num_sent
        assert recipe_file.load_recipe(tmp_path / "out" / "recipe.yaml").model.revision == commit
        assert json.loads((tmp_path / "out" / "result.json").read_text())["step"] == 2
    words = [f"run.output_dir={tmp_path / 'new'}", "model.revision=v2"]
    elsewhere = train(tmp_path, *words, endpoint=hub.url, offline="1", ranks=1, code=2)
    errors = [line for line in elsewhere.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, elsewhere.stderr
    assert f"hf download {NAME} --revision v2" in errors[0]
    assert not (tmp_path / "new").exists()
