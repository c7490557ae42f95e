"""All checks, in the order in which they run. A check takes a FamilyUnderTest and raises CheckFailed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from wfm_ds.contract import denoiser, drawing, exports, inputs, pixels
from wfm_ds.contract.subject import Broken, DoesNotApply, Subject

Check = Callable[[Subject], None]

CHECKS: tuple[Check, ...] = (
    pixels.sizes_are_multiples,
    denoiser.tokens,
    pixels.shapes_agree,
    pixels.encoding_is_the_inverse_of_decoding,
    denoiser.texts_are_lists,
    drawing.several_samples_of_a_prompt,
    drawing.texts_stacked,
    denoiser.wrong_arguments,
    denoiser.frames_given_to_others,
    denoiser.a_batch_is_its_samples,
    drawing.prompts_matter,
    drawing.the_grid_ends_at_the_clean_latents,
    drawing.latents_without_guidance,
    drawing.latents_with_guidance,
    drawing.latents_with_another_embedded_guidance,
    drawing.latents_with_a_negative_prompt,
    drawing.decoded_pixels,
    drawing.given_frames,
    inputs.inputs_change_the_velocity,
    inputs.swapped_inputs_swap_the_velocities,
    inputs.a_batch_of_inputs_is_its_samples,
    inputs.both_halves_of_guidance_are_told,
    inputs.inputs_as_the_stock_pipeline,
    inputs.inputs_that_are_missing,
    denoiser.blocks,
    denoiser.lora_and_checkpointing,
    denoiser.frozen_is_what_no_loss_reaches,
    pixels.bfloat16_denoiser,
    pixels.bfloat16_vae,
    exports.lora_export,
    exports.full_export,
)


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check."""

    check: str
    sentence: str | None
    """None: the check passed."""
    applies: bool = True
    """False: the check does not apply to this family; the message says why."""


def examine(subject: Subject, checks: Sequence[Check] = CHECKS) -> Iterator[Finding]:
    """Run the checks and yield their results. Any exception in the family's code is a failure too."""
    for check in checks:
        name = check.__name__.removeprefix("check_").replace("_", " ")
        try:
            check(subject)
        except DoesNotApply as reason:
            yield Finding(name, str(reason), applies=False)
        except Broken as failure:
            yield Finding(name, str(failure))
        except Exception as error:  # noqa: BLE001, any exception of a user's class is a failure
            yield Finding(name, f"{type(error).__name__} in {_place(error)}: {' '.join(str(error).split())}")
        else:
            yield Finding(name, None)


def _place(error: Exception) -> str:
    """Return file and line of the last traceback frame."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    assert trace is not None
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
