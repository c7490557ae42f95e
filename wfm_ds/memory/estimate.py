"""Memory estimate of a run, in bytes per rank for each phase of a step and each memory category.

It does not include the CUDA context, library workspaces and fragmentation.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from wfm_ds.algorithms import RlAlgorithm, build_rl_algorithm, engine_policy_copies
from wfm_ds.engine.adapter_layers import find_adapter_layers
from wfm_ds.engine.low_bit_linear import FrozenLinear
from wfm_ds.errors import ModelError
from wfm_ds.memory.activations import (
    PassMemory,
    build_shadow_model,
    measure_decode_bytes,
    measure_denoiser_passes,
    measure_encode_bytes,
    parameter_bytes,
    text_bytes,
)
from wfm_ds.memory.engine import FLOAT32_BYTES, EngineMemory
from wfm_ds.models.assets.text_cache import TextCache
from wfm_ds.models.base import DiffusionModel
from wfm_ds.models.sampler import CountingForward, Sampler
from wfm_ds.monitoring.meters import GIB
from wfm_ds.recipe.run_sizes import RunSizes, derive_run_sizes
from wfm_ds.recipe.schema import Recipe
from wfm_ds.sampling.denoise import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Estimated memory of one rank, {phase: {category: bytes}}, parameter counts, and checkpoint and export sizes."""

    phases: Mapping[str, Mapping[str, int]]
    world_size: int
    num_parameters: int  # parameters of the denoiser without adapters
    num_trained: int
    zero_stage: int  # ZeRO stage
    checkpoint_bytes: int  # size of one checkpoint over all ranks
    export_bytes: int

    @classmethod
    def from_engine(
        cls, engine: EngineMemory, phases: Mapping[str, Mapping[str, int]], num_parameters: int
    ) -> MemoryEstimate:
        return cls(
            phases=phases,
            world_size=engine.world_size,
            num_parameters=num_parameters,
            num_trained=engine.num_trained,
            zero_stage=engine.zero_config["stage"],
            checkpoint_bytes=engine.checkpoint_bytes(),
            export_bytes=engine.export_bytes(),
        )

    def phase_bytes(self, phase: str) -> int:
        return sum(self.phases[phase].values())

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=self.phase_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.phase_bytes(self.peak_phase)


def estimate_memory(
    recipe: Recipe,
    model: DiffusionModel,
    world_size: int,
    *,
    device: str = "cuda",
    encoder_bytes: int | None = None,
    keeps_encoders: bool = False,
) -> MemoryEstimate:
    """Estimate the memory per rank of a run with this recipe.

    model: the loaded model, or a copy on the meta device. No engine may have changed its denoiser.
    device: `cuda` or `cpu`. On the CPU, text encoders are float32.
    encoder_bytes: size of the text encoders in bytes. None: they are part of `model`.
    keeps_encoders: whether the text encoders stay loaded.
    Raises RecipeError if `derive_run_sizes` rejects the recipe, and ModelError if the model family reads values of
    tensors, which the meta device does not have.
    """
    try:
        sums = _DiffusionMemory(recipe, model, world_size, device)
        encoders = sums.encoder_bytes() if encoder_bytes is None else encoder_bytes
        static = sums.state_parts() | sums.static_parts() | ({"text encoders": encoders} if keeps_encoders else {})
        phases: dict[str, dict[str, int]] = {"texts": sums.static_parts() | {"text encoders": encoders}}
        phases |= {name: static | parts for name, parts in sums.phase_parts().items()}
    except RuntimeError as error:  # this includes NotImplementedError
        if "meta tensor" not in str(error):
            raise
        raise ModelError(
            f"the family {model.family} reads tensor values, which do not exist on the meta device"
        ) from error
    return MemoryEstimate.from_engine(sums, phases, sums.num_parameters)


class _DiffusionMemory(EngineMemory):
    def __init__(self, recipe: Recipe, model: DiffusionModel, world_size: int, device: str) -> None:
        self.run_sizes: RunSizes = derive_run_sizes(recipe, world_size)
        self.model, self.shadow_model = model, build_shadow_model(model, recipe, engine_policy_copies(recipe))
        super().__init__(recipe, self.shadow_model.unwrapped_denoiser, world_size, device)
        low = self.on_cuda and recipe.model.dtype == "bfloat16"
        self.text_dtype = torch.bfloat16 if low else torch.float32
        num_frozen = self.num_copies + len(recipe.algorithm.list_lora_teachers())
        adapters = self.num_trained + self.num_exported * num_frozen if recipe.lora is not None else 0
        quantized = [m for m in self.shadow_model.unwrapped_denoiser.modules() if isinstance(m, FrozenLinear)]
        self.num_parameters = self.numel - adapters + sum(m.in_features * m.out_features for m in quantized)
        size = recipe.sampling
        self.shape = model.latent_shape(size.height, size.width, size.num_frames)
        self.latent_bytes = math.prod(self.shape) * FLOAT32_BYTES
        self.text_row_bytes = text_bytes(self.shadow_model.text_shapes(), self.text_dtype)

    def static_parts(self) -> dict[str, int]:
        encoders = {id(part) for part in self.model.text_encoders().values()}
        others = [part for part in self.shadow_model.auxiliary_modules() if id(part) not in encoders]
        vae = parameter_bytes(self.shadow_model.pipeline.vae)
        rest = sum(map(parameter_bytes, others)) - vae
        return {"VAE": vae} | ({"other parts": rest} if rest else {})

    def encoder_bytes(self) -> int:
        parts = self.model.text_encoders().values()
        numel = sum(int(parameter.numel()) for part in parts for parameter in part.parameters())
        return numel * int(self.text_dtype.itemsize)

    def phase_parts(self) -> dict[str, dict[str, int]]:
        samples, batch = self.sampling_batch_size(), self.training_batch_size()
        sample_passes = self.measure_passes(samples, training=False)
        step_data = self.step_data_parts()
        gathered = self.gather_memory(training=False)
        decoding = measure_decode_bytes(self.shadow_model, self.shape, self.decode_batch_size(samples))
        sampling = (
            gathered
            | self.merge_lora_parts()
            | {"activations": sample_passes.inference + 2 * samples * self.latent_bytes}
        )
        if self.on_cuda and self.recipe.is_rl and not self.recipe.is_async:
            sampling["decoding beside it"] = decoding  # the previous chunk is decoded on a side stream
        phases = {"sampling": step_data | sampling, "decode": step_data | {"activations": decoding}}
        if self.recipe.data.kind != "prompts":
            phases["encode"] = step_data | {"activations": self.encode_peak_bytes()}
        if references := self.measure_reference_passes(sample_passes):
            phases["references"] = step_data | gathered | {"activations": references.inference}
        phases["train"] = step_data | self.training_parts(self.measure_passes(batch), batch)
        phases["optimizer"] = step_data | self.optimizer_step_parts()
        return phases

    def measure_passes(self, batch: int, *, training: bool = True) -> PassMemory:
        return measure_denoiser_passes(
            self.shadow_model,
            self.shape,
            batch,
            text_dtype=self.text_dtype,
            checkpointing=self.recipe.model.gradient_checkpointing,
            ranks=self.recipe.engine.sequence_parallel,
            training=training,
        )

    def sampling_batch_size(self) -> int:
        num_validated = self.recipe.validation.num_prompts * len(self.recipe.validation.seeds)
        if not self.recipe.is_rl and self.recipe.validation.clips == 1:
            num_validated = min(num_validated, self.recipe.logging.num_samples)
        counts = [math.ceil(num_validated / self.run_sizes.num_replicas)]
        if self.recipe.is_rl:
            counts += [self.run_sizes.samples_per_rank, self.run_sizes.candidates_per_rank]
        # Joint guidance runs the conditional and the unconditional batch in one forward pass.
        halves = 2 if self.recipe.joint_guidance_batches else 1
        return min(self.recipe.engine.max_forward_batch, halves * max(counts))

    def training_batch_size(self) -> int:
        size = min(self.recipe.engine.micro_batch_size, self.run_sizes.terms_per_rank)
        if not self.recipe.is_rl:
            return size * self.recipe.supervised_settings.items_per_sample
        settings, terms = self.recipe.rl.algorithm, self.run_sizes.terms_per_rank
        joined = settings.num_data_terms(terms) > 0 and settings.num_separate_data_terms(terms) == 0
        return 2 * size if joined else size

    def step_data_parts(self) -> dict[str, int]:
        if not self.recipe.is_rl:
            return {"texts": self.training_batch_size() * self.text_row_bytes}
        groups = math.ceil(self.run_sizes.samples_per_rank / self.recipe.rl.rollout.group_size)
        texts = {"texts": (groups + self.recipe.uses_guidance) * self.text_row_bytes}
        if self.recipe.is_async:
            return texts
        return texts | {"rollouts": self.num_resident_latents() * self.latent_bytes}

    def num_resident_latents(self) -> int:
        """Return the maximum number of latent tensors that a rank stores at the same time.

        This includes the candidate samples of sampling.explore, or two rounds of samples with rollout.max_refills.
        """
        recipe, derived = self.recipe, self.run_sizes
        training = derived.samples_per_rank * self.latents_per_rollout()
        if recipe.sampling.explore is not None:  # candidates store only clean latents
            generated = derived.candidates_per_rank
            return max(training, generated) if recipe.sampling.explore.regenerate else training + generated
        return 2 * training if recipe.rl.rollout.max_refills else training

    @functools.cached_property
    def algorithm(self) -> RlAlgorithm:
        return build_rl_algorithm(self.recipe, self.model.rollout_sigmas(self.recipe.sampling))

    def latents_per_rollout(self) -> int:
        """Return the number of latent tensors that a rollout stores per sample."""
        one = torch.zeros(1, *(1 for _ in self.shape))
        trajectory: Trajectory = self.algorithm.plan(1).denoise(
            lambda latents, sigma: torch.zeros_like(latents), one, [0]
        )
        tensors = [trajectory.clean_latents, *trajectory.states.values(), *trajectory.predictions.values()]
        for stored in trajectory.stored_steps:
            tensors += [stored.latents, stored.next_latents, *([] if stored.mean is None else [stored.mean])]
        num_passes = len(self.model.guidance_passes(self.recipe.sampling, 0)) if self.algorithm.keeps_passes else 0
        kept = num_passes * len(trajectory.stored_steps)
        return kept + len({tensor.untyped_storage()._cdata for tensor in tensors})

    def measure_reference_passes(self, of_samples: PassMemory) -> PassMemory | None:
        """Return the memory of a forward pass of a reference policy, or None if the loss has no reference policies.

        of_samples: memory of a forward pass in a rollout.
        """
        if self.recipe.is_rl:
            return of_samples if self.algorithm.uses_old_predictions or self.algorithm.references else None
        references = self.recipe.supervised_settings.reference_policies
        return self.measure_passes(self.training_batch_size(), training=False) if references else None

    def encode_peak_bytes(self) -> int:
        """Return the peak bytes while the VAE encodes training data: one video, or all images of a micro-batch."""
        size = self.recipe.sampling
        if self.model.is_video:
            return measure_encode_bytes(self.shadow_model, (3, size.num_frames, size.height, size.width), 1)
        items = 1 if self.recipe.is_rl else self.recipe.supervised_settings.items_per_sample
        batch = self.recipe.engine.micro_batch_size * items
        return measure_encode_bytes(self.shadow_model, (3, size.height, size.width), batch)

    def merge_lora_parts(self) -> dict[str, int]:
        if not self.recipe.is_rl or not self.recipe.rl.rollout.merge_lora:
            return {}
        layers = find_adapter_layers(self.shadow_model.unwrapped_denoiser)
        return {"merged weights": sum(layer.get_base_layer().weight.numel() for layer in layers) * self.compute_bytes}

    def decode_batch_size(self, samples: int) -> int:
        model = copy.copy(self.shadow_model)
        model.device = torch.device("cuda" if self.on_cuda else "cpu")
        sampler = Sampler(
            model=model,
            text_cache=TextCache(model),
            settings=self.recipe.sampling,
            forward=CountingForward(model.denoise),
        )
        return min(samples, sampler.decode_batch_size(self.shape))

    def training_parts(self, passes: PassMemory, batch: int) -> dict[str, int]:
        """Return {category: bytes} of a forward and backward pass with batch size `batch`.

        With guidance, RL runs a conditional and an unconditional forward pass. During the second, the activations of
        the first are still in memory.
        """
        guided = (
            passes.saved_for_backward + passes.inference
            if self.recipe.is_rl and self.recipe.sampling.uses_guidance()
            else 0
        )
        peak = max(passes.peak, guided) + 6 * batch * self.latent_bytes  # noise, targets, temporaries of the loss
        parts = {"activations": peak, "gradients": self.gradient_bytes} | self.gather_memory(training=True)
        return parts | {"DeepSpeed": self.reduction_bytes()}


def format_memory_table(estimate: MemoryEstimate, *, trained_part: str = "denoiser") -> list[str]:
    """Return the lines of a table in GiB, with one row per memory category and one column per phase.

    trained_part: name of the trained network in the heading.
    """
    names = list(estimate.phases)
    parts = list(dict.fromkeys(part for of_phase in estimate.phases.values() for part in of_phase))
    rows = [(part, [estimate.phases[name].get(part, 0) for name in names]) for part in parts]
    rows.append(("all", [estimate.phase_bytes(name) for name in names]))
    widths = [max(len(name), 7) for name in names]
    head = "  ".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True))
    lines = [
        f"{trained_part + ' parameters':27}{estimate.num_parameters:,}, trained {estimate.num_trained:,}",
        f"estimated memory per rank  {estimate.peak_bytes / GIB:.2f} GiB peak, in the phase {estimate.peak_phase} "
        f"(ZeRO stage {estimate.zero_stage}, {estimate.world_size} rank{'s' * (estimate.world_size != 1)})",
        f"  {'GiB':18}{head}",
    ]
    for part, sizes in rows:
        cells = (
            f"{size / GIB:>{width}.2f}" if size else " " * width for size, width in zip(sizes, widths, strict=True)
        )
        lines.append(f"  {part:18}{'  '.join(cells)}".rstrip())
    return lines
