"""Checks of supported sizes, pixel encoding and decoding, and component dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wfm_ds.contract.family_under_test import CheckFailed, FamilyUnderTest, fail_unless, require_close

MAX_BF16_ERROR = {"denoiser": 2e-2, "vae": 5e-2}  # maximum bfloat16 error, relative to the norm


def require_value_error(description: str, call: Callable[..., Any], *arguments: Any) -> None:
    try:
        call(*arguments)
    except ValueError:
        return
    except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        raise CheckFailed(
            f"{description} raises {type(error).__name__} ({error}); raise a ValueError instead"
        ) from error
    raise CheckFailed(f"{description} is not rejected; raise a ValueError")


def check_size_multiples(subject: FamilyUnderTest) -> None:
    """Check that latent_shape accepts the multiples of size_multiple and rejects other sizes."""
    model, frames = subject.model, subject.size[2]
    multiple = model.size_multiple(frames)
    for size in range(1, 2 * multiple + 2):
        for height, width in ((size, multiple), (multiple, size)):
            if size % multiple == 0:
                model.latent_shape(height, width, frames)
            else:
                arguments = (height, width, frames)
                require_value_error(f"the size {arguments}", model.latent_shape, *arguments)


def check_shapes(subject: FamilyUnderTest) -> None:
    """Check that latents are float32 with the shape from latent_shape, and that decoding returns the original shape."""
    model, (height, width, frames) = subject.model, subject.size
    pixels = subject.random_pixels()
    latents = model.encode_pixels(pixels)
    fail_unless(
        latents.shape == (2, *subject.latent_shape), f"latents {list(latents.shape)}, not {[2, *subject.latent_shape]}"
    )
    fail_unless(latents.dtype == torch.float32, f"latents are {latents.dtype}, not float32")
    decoded = model.decode_latents(latents).shape
    fail_unless(decoded == pixels.shape, f"pixels {list(pixels.shape)} are decoded to {list(decoded)}")
    for wrong in ((height + 1, width, frames), (height, 0, frames), (height, width, frames + 1)):
        require_value_error(f"the size {wrong}", model.latent_shape, *wrong)


def check_encode_inverts_decode(subject: FamilyUnderTest) -> None:
    """Check that decode_latents undoes the latent normalization of encode_pixels."""
    model, vae = subject.model, subject.model.pipeline.vae
    pixels = subject.random_pixels()
    scaled = 2 * (pixels[:, :, None] if subject.case.vae_has_frame_axis else pixels) - 1
    with torch.no_grad():
        raw = vae.encode(scaled)
        z = raw.latent_dist.mode() if hasattr(raw, "latent_dist") else raw[0]
        decoded: Tensor = vae.decode(z, return_dict=False)[0]
    want = ((decoded[:, :, 0] if subject.case.vae_has_frame_axis else decoded) / 2 + 0.5).clamp(0, 1)
    require_close(
        "pixels after encoding and decoding",
        model.decode_latents(model.encode_pixels(pixels)),
        want,
        subject.case.tolerance,
    )


def check_bfloat16_denoiser(subject: FamilyUnderTest) -> None:
    """Check that a bfloat16 denoiser returns float32 velocities close to the velocities of a float32 denoiser.

    Modules in _keep_in_fp32_modules and all components except the denoiser must stay float32.
    """
    low = subject.load_model(torch.bfloat16)
    float32_modules = low.pipeline.transformer._keep_in_fp32_modules or []
    for name, parameter in low.denoiser.named_parameters():
        expected = torch.float32 if any(part in name.split(".") for part in float32_modules) else torch.bfloat16
        fail_unless(parameter.dtype == expected, f"{name} is {parameter.dtype}, not {expected}")
    # A text encoder that is stored in the denoiser's folder is loaded in the denoiser's dtype.
    stored_together = list(low.text_encoders().values()) if {*low.text_folders()} & {*low.denoiser_components} else []
    others = {p.dtype for part in low.auxiliary_modules() if part not in stored_together for p in part.parameters()}
    fail_unless(others == {torch.float32}, f"components other than the denoiser are {others}, not all float32")
    arguments = subject.denoise_arguments(low)
    with torch.no_grad():
        want, got = subject.model.denoise(*arguments), low.denoise(*arguments)
    _require_near("the velocity of a bfloat16 denoiser", got, want, MAX_BF16_ERROR["denoiser"])


def check_bfloat16_vae(subject: FamilyUnderTest) -> None:
    """Check that a bfloat16 VAE returns float32 values close to the values of a float32 VAE.

    The latent_cache_key must differ between the two VAEs.
    """
    model, low = subject.model, subject.load_model(vae_dtype=torch.bfloat16)
    pixels = subject.random_pixels()
    latents = model.encode_pixels(pixels)
    _require_near("the latents of a bfloat16 VAE", low.encode_pixels(pixels), latents, MAX_BF16_ERROR["vae"])
    _require_near(
        "the pixels of a bfloat16 VAE",
        low.decode_latents(latents),
        model.decode_latents(latents),
        MAX_BF16_ERROR["vae"],
    )
    fail_unless({p.dtype for p in low.pipeline.vae.parameters()} == {torch.bfloat16}, "the VAE is not all bfloat16")
    parts = [part for part in low.auxiliary_modules() if part is not low.pipeline.vae]
    dtypes = {p.dtype for part in [*parts, low.denoiser] for p in part.parameters()}
    fail_unless(dtypes == {torch.float32}, f"components other than the VAE are {dtypes}, not all float32")
    fail_unless(
        low.latent_cache_key() != model.latent_cache_key(), "latent_cache_key does not depend on the VAE's dtype"
    )
    fail_unless(low.text_cache_key() == model.text_cache_key(), "text_cache_key depends on the VAE")


def _require_near(description: str, got: Tensor, want: Tensor, most: float) -> None:
    fail_unless(got.dtype == torch.float32, f"{description} is {got.dtype}, not float32")
    distance = float((got - want).norm() / want.norm())
    message = f"{description}: relative difference {distance:.2g}, must be between 0 and {most:g}"
    fail_unless(0 < distance < most, message)
