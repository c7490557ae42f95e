"""The family of docs/models.md as the page has it, held to diffusers' own pipeline."""

import pytest
import torch
from diffusers import Lumina2Pipeline

from families import EXACT, PROMPTS, denoise_latents
from lumina import tiny_lumina
from pages import write_code
from wfm_ds.errors import ModelError
from wfm_ds.models import registry
from wfm_ds.sampling.noise import seeded_normal

FAMILY = "my_lumina:Lumina2"
W, SIZE = 3.0, 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the page's module, which is importable, and a tiny pipeline of diffusers' classes."""
    folder = tmp_path_factory.mktemp("own")
    write_code("models.md", "my_lumina.py", folder)
    tiny_lumina().save_pretrained(folder / "pipeline")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder


@pytest.fixture(scope="module")
def model(folder):
    return registry.load(folder / "pipeline", dtype=torch.float32, device="cpu", own_family=FAMILY)


@pytest.mark.parametrize("w", [1.0, W])
def test_it_draws_what_the_stock_pipeline_draws(model, folder, w):
    stock = Lumina2Pipeline.from_pretrained(folder / "pipeline")
    stock.set_progress_bar_config(disable=True)
    noise = seeded_normal([3, 4], model.latent_shape(SIZE, SIZE))
    want = stock(
        PROMPTS[:2], latents=noise, num_inference_steps=4, output_type="latent", **model.pipeline_call(w, SIZE, SIZE)
    ).images
    got = denoise_latents(
        model,
        noise,
        model.encode_text(PROMPTS[:2]),
        model.sigmas(4, noise.shape[1:]),
        solver="ode",
        guidance_scale=w,
        uncond=model.encode_negative([model.null_text()] * 2) if w > 1 else None,
    )
    torch.testing.assert_close(got, want, **EXACT)


def test_pixels_become_latents_and_back(model):
    pixels = torch.rand(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(5))
    latents = model.encode_pixels(pixels)
    assert latents.shape == (2, *model.latent_shape(SIZE, SIZE))
    assert model.decode(latents).shape == pixels.shape


def test_without_its_name_the_pipeline_is_refused_and_says_how(folder):
    with pytest.raises(ModelError, match=r"class Lumina2Pipeline are not supported; .* your own \(model.family\)"):
        registry.resolve(folder / "pipeline")


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("not_there:Lumina2", "cannot import 'not_there'"),
        ("my_lumina:Other", "my_lumina has no class 'Other' that is a wfm_ds.models.base.DiffusionModel"),
        ("wfm_ds.models.base:DiffusionModel", "the class lacks denoise, encode_text, latent_shape, num_tokens"),
        ("wfm_ds.models.sd3:StableDiffusion3", "is a Lumina2Pipeline, and the class serves StableDiffusion3Pipeline"),
    ],
)
def test_a_class_that_is_no_family_of_this_pipeline_is_named(folder, family, says):
    with pytest.raises(ModelError, match=f"model.family {family}: .*{says}"):
        registry.resolve(folder / "pipeline", family)


def test_what_a_family_must_state_is_named(folder):
    stated = "family = 'half'\n    denoise = encode_text = latent_shape = num_tokens = None\n"
    text = f"from wfm_ds.models.base import DiffusionModel\n\nclass Half(DiffusionModel):\n    {stated}"
    (folder / "my_half.py").write_text(text)
    with pytest.raises(ModelError, match="does not set pipeline_classes, conditioning_keys, default_lora_targets"):
        registry.resolve(folder / "pipeline", "my_half:Half")
