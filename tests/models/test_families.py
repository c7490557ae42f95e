"""Every family against the stock diffusers pipeline, on its tiny pipeline."""

import dataclasses

import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict

from families import CASES, EXACT, PROMPTS, denoise_latents, draw, stock
from wfm_ds.checkpoint.adapter import load_adapter
from wfm_ds.checkpoint.export import export
from wfm_ds.checkpoint.target import ExportTarget
from wfm_ds.models import registry
from wfm_ds.models.conditional_frames import MASK, with_conditional_frames
from wfm_ds.sampling.noise import seeded_normal

FAMILIES = pytest.mark.parametrize("family", CASES)
SEEDS = [11, 12]
W = 4.0


@pytest.fixture(scope="module")
def load(tiny_pipelines):
    """One float32 model per folder for the tests that change nothing."""
    loaded = {}

    def get(family):
        if family not in loaded:
            loaded[family] = fresh(tiny_pipelines, family)
        return loaded[family]

    return get


def fresh(tiny_pipelines, family, dtype=torch.float32, **options):
    return registry.load(tiny_pipelines(family), dtype=dtype, device="cpu", **CASES[family].load_options, **options)


def shape_of(model, family):
    return model.latent_shape(*CASES[family].size)


def noise_for(model, family, count=2):
    return seeded_normal(SEEDS[:count], shape_of(model, family))


def generators():
    return [torch.Generator("cpu").manual_seed(seed) for seed in SEEDS]


def pixels_for(model, family, count=2):
    height, width, frames = CASES[family].size
    shape = (count, 3, frames, height, width) if model.video else (count, 3, height, width)
    return torch.rand(shape, generator=torch.Generator().manual_seed(5))


@FAMILIES
def test_heights_and_widths_are_the_multiples_of_one_number(load, family):
    model, frames = load(family), CASES[family].size[2]
    multiple = model.size_multiple(frames)
    for size in range(1, 2 * multiple + 2):
        for height, width in ((size, multiple), (multiple, size)):
            if size % multiple == 0:
                model.latent_shape(height, width, frames)
            else:
                with pytest.raises(ValueError, match=f"must be a multiple of {multiple}"):
                    model.latent_shape(height, width, frames)


def one_call(model, family, count=2, expert=0):
    """Arguments of one `denoise`: another sigma, prompt and number of conditional frames for each sample."""
    noise, conditioning = noise_for(model, family, count), model.encode_text(PROMPTS[:count])
    if len(model.conditional_frames) > 1:
        latents, most = model.encode_pixels(pixels_for(model, family, count)), max(model.conditional_frames)
        conditioning = with_conditional_frames(conditioning, latents, torch.tensor([0, most])[:count])
    return noise, torch.tensor(CASES[family].sigmas[expert])[:count], conditioning


def sampled(model, family, steps=3):
    """Our own latents of PROMPTS and SEEDS, without guidance."""
    noise = noise_for(model, family)
    return denoise_latents(model, noise, model.encode_text(PROMPTS), model.sigmas(steps, noise.shape[1:]), solver="ode")


@FAMILIES
@pytest.mark.parametrize(("w", "negative"), [(1.0, None), (W, None), (W, "a blue square")])
def test_our_loop_draws_what_the_stock_pipeline_draws(load, tiny_pipelines, family, w, negative):
    model, case = load(family), CASES[family]
    grid = model.sigmas(5, shape_of(model, family))
    call = model.pipeline_call(w, *case.size) | {"generator": generators()}
    if negative is not None:
        call["negative_prompt"] = [negative] * 2
    want = draw(stock(tiny_pipelines(family), case), case, grid, **call)
    got = denoise_latents(
        model,
        noise_for(model, family),
        model.encode_text(PROMPTS),
        grid,
        solver="ode",
        guidance_scale=w,
        uncond=model.encode_negative([model.null_text(negative)] * 2) if w > 1 else None,
    )
    torch.testing.assert_close(got, want, **EXACT)


@FAMILIES
def test_decoding_equals_the_pipelines(load, tiny_pipelines, family):
    model, case = load(family), CASES[family]
    pipeline, grid = stock(tiny_pipelines(family), case), model.sigmas(2, shape_of(model, family))
    call = model.pipeline_call(1.0, *case.size)
    latents = draw(pipeline, case, grid, generator=generators(), **call)
    want = draw(pipeline, case, grid, generator=generators(), **call, output_type="pt")
    got = model.decode(latents)
    torch.testing.assert_close(got, want, **EXACT)
    height, width, frames = case.size
    assert model.to_uint8(got).shape == (2, *((frames,) if model.video else ()), height, width, 3)


@FAMILIES
def test_shapes_agree(load, family):
    model, (height, width, frames) = load(family), CASES[family].size
    pixels, shape = pixels_for(model, family), shape_of(model, family)
    latents = model.encode_pixels(pixels)
    assert latents.shape == (2, *shape)
    assert latents.dtype == torch.float32
    assert model.decode(latents).shape == pixels.shape
    for wrong in ((height + 1, width, frames), (height, 0, frames), (height, width, frames + 1)):
        with pytest.raises(ValueError, match="must be"):
            model.latent_shape(*wrong)


@FAMILIES
def test_latents_of_pixels_are_the_ones_that_decode_to_them(load, family):
    """Not the pixels themselves, which a random VAE loses: decoding and encoding undo each other's normalisation."""
    model = load(family)
    latents = model.encode_pixels(pixels_for(model, family))
    raw = model.pipeline.vae.encode(2 * pixels_for(model, family) - 1)
    z = raw.latent_dist.mode() if hasattr(raw, "latent_dist") else raw[0]
    want = (model.pipeline.vae.decode(z, return_dict=False)[0] / 2 + 0.5).clamp(0, 1)
    torch.testing.assert_close(model.decode(latents), want, **EXACT)


@FAMILIES
def test_a_batch_equals_its_samples(load, family):
    model = load(family)
    latents, sigma, conditioning = one_call(model, family)
    with torch.no_grad():
        batch = model.denoise(latents, sigma, conditioning)
        for i in range(2):
            row = {name: tensor[i : i + 1] for name, tensor in conditioning.items()}
            row |= model.encode_text([PROMPTS[i]])
            torch.testing.assert_close(
                batch[i : i + 1], model.denoise(latents[i : i + 1], sigma[i : i + 1], row), **EXACT
            )


@FAMILIES
def test_repeating_embeddings_equals_repeating_prompts(load, family):
    model = load(family)
    repeated = model.repeat(model.encode_text(PROMPTS), 3)
    encoded = model.encode_text([prompt for prompt in PROMPTS for _ in range(3)])
    assert repeated.keys() == encoded.keys() == model.conditioning_keys
    for name in repeated:
        assert not repeated[name].requires_grad
        torch.testing.assert_close(repeated[name], encoded[name], **EXACT)


@FAMILIES
def test_the_prompt_changes_the_picture(load, family):
    model = load(family)
    noise = noise_for(model, family, 1)
    noise = noise.repeat(2, *[1] * (noise.ndim - 1))
    grid = model.sigmas(2, noise.shape[1:])
    pictures = model.decode(denoise_latents(model, noise, model.encode_text(PROMPTS), grid, solver="ode"))
    assert (pictures[0] - pictures[1]).abs().max() > 1e-3


@FAMILIES
def test_the_exact_field_leads_to_the_clean_latents(load, family):
    model = load(family)
    clean, latents = noise_for(model, family), noise_for(model, family).flip(0)
    grid = model.sigmas(10, clean.shape[1:])
    for s, s_next in zip(grid[:-1].tolist(), grid[1:].tolist(), strict=True):
        latents = latents + (s_next - s) * (latents - clean) / s
    torch.testing.assert_close(latents, clean, **EXACT)


@pytest.mark.parametrize("family", [name for name, case in CASES.items() if case.given])
def test_given_frames_equal_the_stock_image_and_video_pipelines(load, tiny_pipelines, family):
    model, case = load(family), CASES[family]
    pixels, noise = pixels_for(model, family, 1), noise_for(model, family, 1)
    latents, grid = model.encode_pixels(pixels), model.sigmas(4, noise.shape[1:])
    for count in [n for n in model.conditional_frames if n > 0]:
        pipeline, call = case.given(tiny_pipelines(family), pixels, count)
        call |= model.pipeline_call(1.0, *case.size)
        want = draw(pipeline, case, grid, **call | {"prompt": PROMPTS[:1], "latents": noise})
        conditioning = with_conditional_frames(model.encode_text(PROMPTS[:1]), latents, torch.tensor([count]))
        got = denoise_latents(model, noise, conditioning, grid, solver="ode")
        torch.testing.assert_close(got, want, **EXACT)
        torch.testing.assert_close(got[:, :, :count], latents[:, :, :count], **EXACT)
        free = denoise_latents(model, noise, model.encode_text(PROMPTS[:1]), grid, solver="ode")
        assert (got - free)[:, :, count:].abs().max() > 1e-3  # the free frames see the given ones


def add_adapter(model, b_std):
    """LoRA of rank 2, alpha 6 on the family's targets; B random of this deviation."""
    targets = list(model.default_lora_targets)
    model.denoiser.requires_grad_(False)
    torch.manual_seed(0)
    model.denoiser.add_adapter(LoraConfig(r=2, lora_alpha=6, target_modules=targets, init_lora_weights="gaussian"))
    with torch.no_grad():
        for name, weight in model.denoiser.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, b_std)


def gradients(model, family, checkpointing):
    for part in model.denoiser_parts:
        getattr(model.pipeline, part).gradient_checkpointing = False
    if checkpointing:
        model.denoiser.enable_gradient_checkpointing()
    model.denoiser.zero_grad(set_to_none=True)
    for expert in range(len(model.sigma_ranges)):
        model.denoise(*one_call(model, family, expert=expert)).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.denoiser.named_parameters() if p.requires_grad}


@FAMILIES
def test_lora_reaches_every_target_and_checkpointing_changes_no_gradient(tiny_pipelines, family):
    model = fresh(tiny_pipelines, family)
    add_adapter(model, b_std=0.3)
    plain = gradients(model, family, checkpointing=False)
    recomputed = gradients(model, family, checkpointing=True)
    assert all(any(f".{target}.lora_A" in name for name in plain) for target in model.default_lora_targets)
    for name in plain:
        reachable = not any(layer in name for layer in CASES[family].without_gradient)
        assert (plain[name].abs().max() > 0) == reachable, name
        torch.testing.assert_close(recomputed[name], plain[name], rtol=1e-6, atol=1e-9)


@FAMILIES
def test_blocks_are_the_ones_that_the_network_lists(load, family):
    model = load(family)
    blocks = [m for m in model.denoiser.modules() if isinstance(m, model.block_classes)]
    listed = [getattr(getattr(model.pipeline, part), CASES[family].blocks) for part in model.denoiser_parts]
    assert blocks == [block for part in listed for block in part]


@FAMILIES
def test_bfloat16_is_close_to_float32_and_keeps_what_the_network_wants_in_float32(load, tiny_pipelines, family):
    low = fresh(tiny_pipelines, family, torch.bfloat16)
    kept = low.pipeline.transformer._keep_in_fp32_modules or []
    for name, parameter in low.denoiser.named_parameters():
        expected = torch.float32 if any(part in name.split(".") for part in kept) else torch.bfloat16
        assert parameter.dtype == expected, name
    assert {p.dtype for part in low.frozen_parts() for p in part.parameters()} == {torch.float32}
    arguments = one_call(low, family)
    with torch.no_grad():
        want, got = load(family).denoise(*arguments), low.denoise(*arguments)
    assert got.dtype == torch.float32
    assert 0 < (got - want).norm() / want.norm() < 2e-2


@FAMILIES
def test_a_bfloat16_vae_takes_and_gives_float32(load, tiny_pipelines, family):
    model, low = load(family), fresh(tiny_pipelines, family, vae_dtype=torch.bfloat16)
    assert {p.dtype for p in low.pipeline.vae.parameters()} == {torch.bfloat16}
    others = [part for part in low.frozen_parts() if part is not low.pipeline.vae]
    assert {p.dtype for part in [*others, low.denoiser] for p in part.parameters()} == {torch.float32}
    pixels = pixels_for(model, family)
    latents = model.encode_pixels(pixels)
    for got, want in ((low.encode_pixels(pixels), latents), (low.decode(latents), model.decode(latents))):
        assert got.dtype == torch.float32
        assert 0 < (got - want).norm() / want.norm() < 5e-2
    assert low.latent_identity() != model.latent_identity()  # what is cached of the two is kept apart
    assert low.text_identity() == model.text_identity()


@FAMILIES
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, s, c: (x, s[:, None], c), "sigma must be float32"),
        (lambda x, s, c: (x, s[:1], c), "sigma must be float32"),
        (lambda x, s, c: (x, s.double(), c), "sigma must be float32"),
        (lambda x, s, c: (x, s * 0, c), "above 0"),
        (lambda x, s, c: (x, s + 1, c), "at most 1"),
        (lambda x, s, c: (x, s * float("nan"), c), "at most 1"),
        (lambda x, s, c: (x.bfloat16(), s, c), "latents must be float32"),
        (lambda x, s, c: (x[..., None], s, c), r"latents \[B,C,"),
        (lambda x, s, c: (x, s, {**c, "train_frames": s}), "train_frames"),
        (lambda x, s, c: (x, s, dict(list(c.items())[1:])), "conditioning must hold"),
        (lambda x, s, c: (x, s, {name: t[:1] for name, t in c.items()}), "has 1 rows, the latents have 2"),
    ],
)
def test_wrong_arguments_of_denoise_are_refused(load, family, change, message):
    model = load(family)
    with pytest.raises(ValueError, match=message):
        model.denoise(*change(*one_call(model, family)))


@FAMILIES
def test_given_frames_are_for_families_that_take_them(load, family):
    model = load(family)
    noise = noise_for(model, family)
    conditioning = model.encode_text(PROMPTS) | {MASK: torch.zeros(2, 1, 1, 1, 1)}
    with pytest.raises(ValueError, match="both of" if len(model.conditional_frames) > 1 else "must hold"):
        model.denoise(noise, torch.ones(2), conditioning)


@FAMILIES
@pytest.mark.parametrize("prompts", [[], "a red circle"])
def test_text_must_be_a_list_of_prompts(load, family, prompts):
    with pytest.raises(ValueError, match="list of at least one text"):
        load(family).encode_text(prompts)


@dataclasses.dataclass
class Source:
    """What an export asks of an engine, for a denoiser in one process."""

    model: object
    lora: bool

    def lora_config(self):
        return self.model.denoiser.peft_config["default"] if self.lora else None

    def named_full_tensors(self, policy):
        module = self.model.denoiser
        yield from (get_peft_model_state_dict(module) if self.lora else module.state_dict()).items()


@FAMILIES
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_plain_diffusers_draws_the_trained_models_pictures(tiny_pipelines, family, kind, tmp_path):
    model, case = fresh(tiny_pipelines, family), CASES[family]
    before = sampled(model, family)
    if kind == "lora":
        model.freeze_all_but(model.default_lora_targets)
        add_adapter(model, b_std=0.3)
    else:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in model.denoiser.parameters():
                weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    out = export(
        ExportTarget.of(model),
        Source(model, kind == "lora"),
        tmp_path / "out",
        policy="train",
        dtype=torch.float32,
        is_main=True,
    )
    pipeline = stock(model.path if kind == "lora" else out, case)
    if kind == "lora":
        pipeline.load_lora_weights(str(out), weight_name="model.safetensors", adapter_name="default")
        if "transformer_2" in model.denoiser_parts:
            second = {"weight_name": "model_2.safetensors", "load_into_transformer_2": True}
            pipeline.load_lora_weights(str(out), adapter_name="default", **second)
        assert pipeline.get_active_adapters() == ["default"]
    grid, want = model.sigmas(3, shape_of(model, family)), sampled(model, family)
    got = draw(pipeline, case, grid, generator=generators(), **model.pipeline_call(1.0, *case.size))
    torch.testing.assert_close(got, want, **EXACT)
    assert (got - before).abs().max() > 1e-2
    if kind == "lora":  # on a model of ours it is the same to the last bit
        again = fresh(tiny_pipelines, family)
        load_adapter(again, out)
        assert torch.equal(sampled(again, family), want)
