"""The family of docs/own_model.md, by the code of that page, compared with the diffusers pipeline."""

import re
import runpy

import pytest

from each_case import check_each
from lumina import tiny_lumina
from pages import DOCS, write_code
from wfm_ds.cli.models_check import main
from wfm_ds.contract.checks import CHECKS
from wfm_ds.errors import ModelError
from wfm_ds.models import registry


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the page's module, which is importable, and a tiny pipeline of diffusers' classes."""
    folder = tmp_path_factory.mktemp("own")
    write_code("own_model.md", "my_lumina.py", folder)
    tiny_lumina().save_pretrained(folder / "pipeline")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder


def test_the_page_s_lines_check_it(folder, monkeypatch, capsys):
    """Both lines as they stand there, and the last line of what they print."""
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
    assert verdicts.count("-") == 8  # no inputs, no given frames, no embedded guidance
    assert set(verdicts) == {"passed", "-"}


def test_without_its_name_the_pipeline_is_refused_and_says_how(folder):
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


def test_what_a_family_must_state_is_named(folder):
    stated = "family = 'half'\n    denoise = encode_text = latent_shape = num_tokens = None\n"
    text = f"from wfm_ds.models.base import DiffusionModel\n\nclass Half(DiffusionModel):\n    {stated}"
    (folder / "my_half.py").write_text(text)
    with pytest.raises(ModelError, match="does not set pipeline_classes, conditioning_keys, default_lora_targets"):
        registry.resolve_pipeline(folder / "pipeline", "my_half:Half")
