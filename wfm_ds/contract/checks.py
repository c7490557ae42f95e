"""All checks, in the order in which they run."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from wfm_ds.contract import denoiser_checks, export_checks, input_checks, pixel_checks, sampling_checks
from wfm_ds.contract.family_under_test import CheckFailed, CheckNotApplicable, FamilyUnderTest

Check = Callable[[FamilyUnderTest], None]

CHECKS: tuple[Check, ...] = (
    pixel_checks.check_size_multiples,
    denoiser_checks.check_num_tokens,
    pixel_checks.check_shapes,
    pixel_checks.check_encode_inverts_decode,
    denoiser_checks.check_prompt_lists,
    sampling_checks.check_several_samples_of_a_prompt,
    sampling_checks.check_stacked_texts,
    denoiser_checks.check_invalid_arguments,
    denoiser_checks.check_unsupported_frames,
    denoiser_checks.check_batch_matches_samples,
    sampling_checks.check_prompts_matter,
    sampling_checks.check_grid_ends_at_clean_latents,
    sampling_checks.check_latents_without_guidance,
    sampling_checks.check_latents_with_guidance,
    sampling_checks.check_latents_with_another_embedded_guidance,
    sampling_checks.check_latents_with_a_negative_prompt,
    sampling_checks.check_decoded_pixels,
    sampling_checks.check_conditioning_frames,
    input_checks.check_inputs_change_velocity,
    input_checks.check_swapped_inputs,
    input_checks.check_batch_with_inputs,
    input_checks.check_inputs_in_both_guidance_halves,
    input_checks.check_inputs_match_reference,
    input_checks.check_missing_inputs,
    input_checks.check_images_change_embeddings,
    input_checks.check_text_cache_with_images,
    denoiser_checks.check_block_classes,
    denoiser_checks.check_lora_and_checkpointing,
    denoiser_checks.check_unused_parameters,
    pixel_checks.check_bfloat16_denoiser,
    pixel_checks.check_bfloat16_vae,
    export_checks.check_lora_export,
    export_checks.check_full_export,
)


@dataclass(frozen=True, slots=True)
class CheckResult:
    name: str
    message: str | None
    """Why the check failed or does not apply. None if it passed."""
    applies: bool = True
    """Whether the check applies to this family."""


def run_checks(subject: FamilyUnderTest, checks: Sequence[Check] = CHECKS) -> Iterator[CheckResult]:
    """Run the checks and yield their results. Any exception in the family's code counts as a failure."""
    for check in checks:
        name = check.__name__.removeprefix("check_").replace("_", " ")
        try:
            check(subject)
        except CheckNotApplicable as reason:
            yield CheckResult(name, str(reason), applies=False)
        except CheckFailed as failure:
            yield CheckResult(name, str(failure))
        except Exception as error:  # noqa: BLE001, any exception of a user's class is a failure
            place = traceback.extract_tb(error.__traceback__)[-1]
            message = f"{type(error).__name__} in {place.filename}:{place.lineno}: {' '.join(str(error).split())}"
            yield CheckResult(name, message)
        else:
            yield CheckResult(name, None)
