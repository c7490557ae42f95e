"""The recipe that `wfm init` proposes to distill a model to a few denoising steps without guidance."""

from __future__ import annotations

from wfm_ds.cli.init.model_summary import PipelineSummary
from wfm_ds.cli.init.recipe_lines import RecipeLine, RecipeRequest, Sections
from wfm_ds.cli.init.sections import (
    common_sections,
    create_held_out_lines,
    frame_lines,
    prompt_count_line,
    prompt_file_lines,
    require_fitting_model,
)
from wfm_ds.errors import UserError

STUDENT_STEPS = 4
USUAL_SHIFT = 5.0  # for a scheduler without a timestep shift, as in recipes/cp_dmd2.yaml


def create_distillation_sections(request: RecipeRequest, model: PipelineSummary) -> Sections:
    require_fitting_model(request, model)
    data = request.data
    if model.num_steps is not None:
        raise UserError(f"{model.title} is distilled to {model.num_steps} steps already: choose its base model")
    if model.has_experts:
        raise UserError(f"{model.title} has two experts, which distillation does not support: choose another model")
    shift = [] if model.has_fixed_shift else [RecipeLine("grid_shift", USUAL_SHIFT, "the scheduler has no fixed shift")]
    levels = [] if model.has_fixed_shift else [RecipeLine("levels", {"shift": USUAL_SHIFT}, "the same as grid_shift")]
    return {
        **common_sections(request, model, steps=1000, unit="one student update per step"),
        "ema": [RecipeLine("decay", 0.95)],
        "data": prompt_file_lines(request),
        "sampling": [
            RecipeLine("height", model.height, "default of the pipeline"),
            RecipeLine("width", model.width),
            *frame_lines(request, model),
            RecipeLine("steps", STUDENT_STEPS, "denoising steps of the student; the same in eval_steps"),
            RecipeLine("grid", "even", "levels 1, 3/4, 1/2, 1/4 before the shift"),
            *shift,
            RecipeLine("eval_steps", STUDENT_STEPS),
            RecipeLine("eval_grid", "even"),
        ],
        "algorithm": [
            RecipeLine("name", "dmd2", "docs/few_steps.md"),
            RecipeLine(
                "teacher", {"guidance_scale": model.guidance_scale}, "the base model, as its pipeline guides it"
            ),
            RecipeLine("fake", {"updates": 5}, "the fake score must keep up with the student"),
            *levels,
        ],
        "rollout": [
            RecipeLine("prompts_per_step", min(8, data.num_samples)),
            RecipeLine("group_size", 2, "samples per prompt; rollout/spread compares them"),
        ],
        "validation": [
            RecipeLine("every", 100),
            *(create_held_out_lines(request) or [prompt_count_line(data.num_samples)]),
        ],
        "checkpoint": [RecipeLine("every", 200)],
    }
