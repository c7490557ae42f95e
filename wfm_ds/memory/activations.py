"""Activation memory of a recipe, measured on the meta device without computing or allocating anything.

Only tensors are counted, not the CUDA context and the workspaces of libraries.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wfm_ds.engine.base_precision import quantise_base
from wfm_ds.engine.checkpointing import enable_checkpointing
from wfm_ds.engine.flop_counter import copy_to_meta, make_trainable
from wfm_ds.engine.fused_norms import fuse_norms
from wfm_ds.engine.live_bytes import LiveByteCounter, emulate_gpu_attention
from wfm_ds.engine.preparation import DTYPES
from wfm_ds.models.assets.loading import cast_persistent_buffers
from wfm_ds.models.base import DiffusionModel
from wfm_ds.recipe.deepspeed import policy_copies
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.shared_defaults import Checkpointing

META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class PassMemory:
    """Bytes of a model's forward and backward passes, without weights and their gradients."""

    inference: int  # peak of a forward pass without gradient
    saved_for_backward: int = 0  # activations kept after a forward pass with gradient
    peak: int = 0  # peak of a forward pass with gradient and its backward pass


def build_shadow_model(model: DiffusionModel, recipe: Recipe, policies: frozenset[str]) -> DiffusionModel:
    """Return a copy of the model on the meta device, prepared for training with this recipe.

    model: the model before adapters are added. policies: names of the engine's policy copies. In a LoRA run, the result
    has an adapter for each policy copy, each extra adapter and each frozen teacher.
    """
    shadow, dtype = copy.copy(model), DTYPES[recipe.model.dtype]
    shadow.pipeline = copy.copy(model.pipeline)
    shadow.pipeline.vae = copy_to_meta(model.pipeline.vae)
    shadow.unwrapped_denoiser = shadow.denoiser = denoiser = copy_to_meta(model.unwrapped_denoiser)
    shadow.device, shadow.dtype = META, dtype
    # By default, text_shapes encodes a text. The copy has no weights and cannot do this, so store the shapes.
    if type(model).text_shapes is DiffusionModel.text_shapes:
        shapes = model.text_shapes()
        shadow.text_shapes = lambda: shapes  # type: ignore[method-assign]
    quantise_base(denoiser, model.block_classes, recipe.model.base_precision, dtype, META)
    targets = (recipe.lora and recipe.lora.target_modules) or list(model.default_lora_targets)
    if recipe.lora is not None:
        shadow.prepare_for_lora(recipe.lora.trainable_layers(targets))
    frozen = [*sorted(policy_copies(policies, lora=True)), *recipe.algorithm.list_lora_teachers()]
    extra = list(recipe.algorithm.extra_adapters)
    make_trainable(denoiser, recipe, targets, frozen, model.find_unused_parameters(), extra_adapters=extra)
    for parameter in shadow.pipeline.vae.parameters():
        parameter.data = parameter.data.to(DTYPES[recipe.model.vae_dtype])
    for network in getattr(denoiser, "networks", [denoiser]):
        cast_persistent_buffers(network, dtype)
    if recipe.engine.fused_norms:
        fuse_norms(denoiser)
    return shadow


def measure_denoiser_passes(
    shadow: DiffusionModel,
    shape: Sequence[int],
    batch: int,
    *,
    text_dtype: torch.dtype,
    checkpointing: Checkpointing,
    ranks: int,
    training: bool = True,
) -> PassMemory:
    """Measure the memory of a forward pass without gradient and, if `training`, of a forward pass with gradient and its
    backward pass.

    shape: latent shape of one sample. batch: number of samples. ranks: number of ranks over which the tokens of a
    sample are sharded (sequence parallelism). With several ranks, the memory per rank is extrapolated linearly from two
    latent sizes.
    """
    module: Any = shadow.unwrapped_denoiser
    enable_checkpointing(module, checkpointing)

    def measure(latents: Sequence[int]) -> PassMemory:
        return _measure_passes(shadow, latents, batch, text_dtype, training=training)

    whole = measure(shape)
    if ranks > 1:
        patch = next(p for p in range(1, shape[-2] + 1) if shadow.num_tokens((*shape[:-2], p, shape[-1])))
        rows = max(patch, shape[-2] // 2 // patch * patch)
        partial = measure((*shape[:-2], rows, shape[-1]))
        rows_per_rank = shape[-2] / ranks
        whole = PassMemory(
            *(
                round(low + (high - low) * (rows_per_rank - rows) / (shape[-2] - rows))
                for low, high in zip(astuple(partial), astuple(whole), strict=True)
            )
        )
    if checkpointing:
        module.disable_gradient_checkpointing()
    return whole


def _measure_passes(
    shadow: DiffusionModel, shape: Sequence[int], batch: int, text_dtype: torch.dtype, *, training: bool
) -> PassMemory:
    with torch.no_grad(), LiveByteCounter("meta") as live, emulate_gpu_attention():
        _predict_velocity(shadow, shape, batch, text_dtype)
    inference = live.peak
    if not training:
        return PassMemory(inference)
    discarded = discard_gradients(shadow.unwrapped_denoiser)
    with discarded, LiveByteCounter("meta") as live, emulate_gpu_attention():
        velocity = _predict_velocity(shadow, shape, batch, text_dtype)
        kept = live.current
        torch.autograd.backward(velocity, torch.empty_like(velocity))
    return PassMemory(inference, kept, live.peak)


@contextlib.contextmanager
def discard_gradients(module: nn.Module) -> Iterator[None]:
    """Delete the gradients of parameters in the `with` block as soon as they are complete.

    In a run, the engine moves them to a reduction bucket, which is not activation memory.
    """

    def delete_gradient(parameter: Tensor) -> None:
        parameter.grad = None

    trained: list[Any] = [parameter for parameter in module.parameters() if parameter.requires_grad]
    with contextlib.ExitStack() as hooks:
        for parameter in trained:
            hooks.enter_context(parameter.register_post_accumulate_grad_hook(delete_gradient))
        yield


def _predict_velocity(shadow: DiffusionModel, shape: Sequence[int], batch: int, text_dtype: torch.dtype) -> Tensor:
    conditioning = empty_conditioning(shadow.text_shapes(), text_dtype, batch)
    conditioning |= empty_conditioning(shadow.input_shapes(shape), torch.float32, batch)
    latents, sigma = torch.empty(batch, *shape, device=META), torch.empty(batch, device=META)
    return shadow.denoise(latents, sigma, conditioning, 0)  # all experts have the same architecture


def measure_decode_bytes(shadow: DiffusionModel, shape: Sequence[int], batch: int) -> int:
    """Return the peak bytes while the VAE decodes latents [batch, *shape], without the safety checker on the CPU."""
    return _measure_peak(lambda: DiffusionModel.decode_latents(shadow, torch.empty(batch, *shape, device=META)))


def measure_encode_bytes(shadow: DiffusionModel, pixels: Sequence[int], batch: int) -> int:
    """Return the peak bytes while the VAE encodes `batch` images or videos.

    pixels: shape of one image (3, height, width) or one video (3, frames, height, width).
    """
    return _measure_peak(lambda: shadow.encode_pixels(torch.empty(batch, *pixels, device=META)))


def _measure_peak(work: Callable[[], object]) -> int:
    with torch.no_grad(), LiveByteCounter("meta") as live, emulate_gpu_attention():
        work()
    return int(live.peak)


def text_bytes(shapes: Mapping[str, Sequence[int]], text_dtype: torch.dtype) -> int:
    """Return the bytes of one prompt's text conditioning. shapes: {tensor name: shape}."""
    return sum(tensor.nbytes for tensor in empty_conditioning(shapes, text_dtype, 1).values())


def empty_conditioning(shapes: Mapping[str, Sequence[int]], text_dtype: torch.dtype, batch: int) -> dict[str, Tensor]:
    """Return {name: tensor [batch, *shape]} on the meta device. Masks are int64; other tensors have `text_dtype`."""
    return {
        name: torch.empty(batch, *shape, device=META, dtype=torch.int64 if name.endswith("mask") else text_dtype)
        for name, shape in shapes.items()
    }


def parameter_bytes(module: nn.Module | None) -> int:
    if module is None:
        return 0
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
