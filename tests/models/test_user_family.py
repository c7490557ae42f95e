"""The custom family of docs/own_model.md, built from the page's code and compared with the diffusers pipeline."""

import re
import runpy

import pytest
import torch

from commands import wfm_command
from each_case import check_each
from lumina import tiny_lumina
from pages import DOCS, code, table_rows, write_code
from wfm_ds.cli.main import main as wfm
from wfm_ds.contract.case import Case, load_reference_pipeline
from wfm_ds.contract.checks import CHECKS
from wfm_ds.errors import ModelError
from wfm_ds.models import registry
from wfm_ds.models.assets.meta_loading import load_on_meta_device
from wfm_ds.models.base import DiffusionModel

main = wfm_command("models check")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the page's module (importable) and a tiny pipeline of diffusers classes."""
    folder = tmp_path_factory.mktemp("own")
    write_code("own_model.md", "my_lumina.py", folder)
    tiny_lumina().save_pretrained(folder / "pipeline")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder


def test_the_page_s_lines_check_it(folder, monkeypatch, capsys):
    """Run the page's two commands; the page must quote the last line that they print."""
    monkeypatch.chdir(folder)
    write_code("own_model.md", "tiny_lumina.py", folder)
    page = (DOCS / "own_model.md").read_text()
    make, check = re.search(r"\npython (tiny_lumina\.py)\nwfm models check (.*)\n", page).groups()
    runpy.run_path(make, run_name="__main__")
    assert main(check.split()) == 0
    printed = capsys.readouterr().out.splitlines()
    assert f"\n{printed[-1]}\n" in page
    verdicts = [line.split()[0] for line in printed[:-1]]
    assert len(verdicts) == len(CHECKS)
    assert verdicts.count("-") == 10  # no inputs or images, no conditioning frames, no embedded guidance
    assert set(verdicts) == {"passed", "-"}


@pytest.mark.slow
def test_the_page_s_case_and_larger_weights_make_the_checks_of_packed_tokens_pass(folder, tiny_pipelines, capsys):
    """The pipeline of FLUX.2-dev returns packed tokens. The page's case has no inputs, so this family has none."""
    blocks = [code("own_model.md", f"in {name}.py") for name in ("tiny_lumina", "my_lumina")]
    family = "from wfm_ds.models.flux2 import Flux2\nclass TextToImage(Flux2): input_specs = {}"
    (folder / "my_packed.py").write_text("\n".join([family, *blocks]))
    scale_matrices = runpy.run_path(str(folder / "my_packed.py"))["scale_matrices"]
    pipeline = load_reference_pipeline(tiny_pipelines("flux2_dev"), Case())
    words = ["my_packed:TextToImage", "--tiny", str(folder / "packed"), "--case", "my_packed:CASE"]
    for factor, outcome in (({"factor": 0.2}, 1), ({}, 0)):
        for network in (pipeline.transformer, pipeline.text_encoder):
            scale_matrices(network, **factor)
        pipeline.save_pretrained(folder / "packed")
        assert main(words) == outcome
        failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED")]
        assert len(failed) == outcome
        assert all(
            "the pixels of two prompts differ by only" in line and "use larger random weights" in line
            for line in failed
        )


def test_a_pipeline_of_a_user_family_is_refused_without_the_family_name(folder):
    with pytest.raises(ModelError, match=r"class Lumina2Pipeline are not supported; .* own family \(model.family\)"):
        registry.resolve_pipeline(folder / "pipeline")


@check_each(
    ("family", "says"),
    [
        ("not_there:Lumina2", "cannot import 'not_there'"),
        ("my_lumina:Other", "has no class 'Other' that is a subclass of wfm_ds.models.base.DiffusionModel"),
        ("wfm_ds.models.base:DiffusionModel", "does not implement denoise, encode_text, latent_shape, num_tokens"),
        ("wfm_ds.models.sd3:StableDiffusion3", "is a Lumina2Pipeline, but the class supports StableDiffusion3Pipeline"),
    ],
)
def test_a_class_that_is_no_family_of_this_pipeline_is_named(folder, family, says):
    with pytest.raises(ModelError, match=f"model.family {family}: .*{says}"):
        registry.resolve_pipeline(folder / "pipeline", family)


def test_each_missing_member_of_the_page_s_table_is_named(folder):
    """Remove every mandatory member from the page's class, one at a time."""
    rows = table_rows("own_model.md", "| member | meaning |")
    members = [re.match(r"`(\w+)", cells[0])[1] for cells in rows]
    assert {*registry.REQUIRED_ATTRIBUTES, *DiffusionModel.__abstractmethods__} == set(members)
    page = (folder / "my_lumina.py").read_text()
    for member in members:
        text, count = re.subn(rf"^    (def )?{member}\b", r"    \1renamed", page, flags=re.MULTILINE)
        assert count == 1, member
        (folder / f"without_{member}.py").write_text(text)
        with pytest.raises(ModelError, match=rf"class does not (set|implement) {member}$"):
            registry.resolve_pipeline(folder / "pipeline", f"without_{member}:Lumina2")


def test_a_family_that_reads_tensor_values_passes_the_check_without_an_estimate(folder, monkeypatch, capsys):
    """Lumina's network reads its mask on the host; the text encoding of this family also reads its embeddings."""
    (folder / "my_strict.py").write_text(
        "from my_lumina import Lumina2\n\nclass Strict(Lumina2):\n    def encode_text(self, prompts):\n"
        "        rows = super().encode_text(prompts)\n        assert rows['prompt_embeds'].any()\n        return rows\n"
    )
    monkeypatch.chdir(folder)
    words = ["sd3_nft", "model.path=pipeline", "model.family=my_strict:Strict", "run.output_dir=out"]
    assert wfm(["check", "--tiny", *words]) == 0
    checked = capsys.readouterr().out
    assert "memory not estimated: the family lumina2 reads tensor values" in checked
    assert "all checks passed" in checked
    model = load_on_meta_device("pipeline", dtype=torch.float32, user_family="my_strict:Strict")
    with pytest.raises(ModelError, match="has no text_shapes"):
        model.text_shapes()
