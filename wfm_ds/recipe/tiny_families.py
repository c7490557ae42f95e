"""The tiny pipeline that stands in for a released model, and the size of its images or videos.

`wfm_ds.models.tiny` writes these pipelines. This table is separate so that recipes can be read without torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wfm_ds.errors import RecipeError

TINY_PREFIX = "tiny:"


@dataclass(frozen=True, slots=True)
class TinyFamily:
    """A tiny pipeline `tiny:NAME`."""

    name: str
    released: tuple[str, ...]
    """Parts of the names of the models that it stands in for, in lower case."""
    height: int = 32
    width: int = 32
    has_guardrail: bool = False


# The first match wins.
TINY_FAMILIES = (
    TinyFamily("sd3", ("stable-diffusion-3",)),
    TinyFamily("flux2", ("flux.2-klein",)),
    TinyFamily("flux2_dev", ("flux.2-dev",)),
    TinyFamily("qwen_image", ("qwen-image",)),
    TinyFamily("z_image", ("z-image",)),
    TinyFamily("sana_video", ("sana-video",)),
    TinyFamily("sana_wm", ("sana-wm",)),
    TinyFamily("sana", ("sana1.5", "sana_1600m", "sana_600m")),
    TinyFamily("cosmos25", ("cosmos-predict2.5",), has_guardrail=True),
    TinyFamily("cosmos3", ("cosmos3",), has_guardrail=True),
    TinyFamily("wan21_i2v", ("wan2.1-i2v", "wan2.1-flf2v")),
    TinyFamily("wan21", ("wan2.1",)),
    TinyFamily("wan22_i2v", ("wan2.2-i2v",)),
    TinyFamily("wan22_ti2v", ("wan2.2-ti2v",)),
    TinyFamily("wan22", ("wan2.2",)),
    TinyFamily("qwen25vl", ("qwen2.5-vl", "cosmos-reason1")),
    TinyFamily("qwen3vlmoe", ("qwen3-vl-30b", "qwen3-vl-235b")),
    TinyFamily("qwen3vl", ("qwen3-vl", "cosmos-reason2")),
    # The models of the quickstarts, by the folders of their runs.
    TinyFamily("moving", ("quickstart-video",)),
    TinyFamily("world", ("quickstart-world",), height=8, width=16, has_guardrail=True),
    TinyFamily("digits", ("quickstart",), height=8, width=8),
)
_BY_NAME = {family.name: family for family in TINY_FAMILIES}
_PIPELINE_CLASSES = {  # without Wan, whose classes have several families
    "StableDiffusion3Pipeline": "sd3",
    "Flux2KleinPipeline": "flux2",
    "Flux2Pipeline": "flux2_dev",
    "QwenImagePipeline": "qwen_image",
    "ZImagePipeline": "z_image",
    "SanaPipeline": "sana",
    "SanaVideoPipeline": "sana_video",
    "SanaImageToVideoPipeline": "sana_video",
    "SanaWMPipeline": "sana_wm",
    "Cosmos2_5_PredictBasePipeline": "cosmos25",
    "Cosmos3OmniPipeline": "cosmos3",
}
_LANGUAGE_MODELS = {"qwen2_5_vl": "qwen25vl", "qwen3_vl": "qwen3vl", "qwen3_vl_moe": "qwen3vlmoe"}


def find_tiny_family(model_path: str) -> TinyFamily:
    """Return the family of a recipe's model.path: a released model, a local pipeline folder, or `tiny:FAMILY`.

    Raises RecipeError if the family is unknown.
    """
    family = _BY_NAME.get(_read_family(Path(model_path).expanduser())) or match_released_name(model_path)
    if family is None:
        raise RecipeError(
            f"model.path {model_path}: --tiny cannot tell the model family from this path: add model.path=tiny:FAMILY "
            f"({', '.join(_BY_NAME)})"
        )
    return family


def match_released_name(model_path: str) -> TinyFamily | None:
    """Return the family of a released model with a name like the last components of this path, or None."""
    if model_path.startswith(TINY_PREFIX):
        return _BY_NAME.get(model_path.removeprefix(TINY_PREFIX))
    last_part = model_path.rstrip("/").rpartition("/")[2].lower()
    is_run = "safetensors" in model_path.split("/") or model_path.startswith("outputs/")
    text = model_path.lower() if is_run else last_part
    return next((family for family in TINY_FAMILIES if any(name in text for name in family.released)), None)


def _read_family(folder: Path) -> str:
    """Return the family of a local model folder, or "" if it has none."""
    index = _read_object(folder / "model_index.json")
    name = str(index.get("_class_name"))
    if name == "WanPipeline":
        return (
            "wan22_ti2v" if index.get("expand_timesteps") else "wan22" if _has_part(index, "transformer_2") else "wan21"
        )
    if name == "WanImageToVideoPipeline":
        return "wan22_i2v" if _has_part(index, "transformer_2") else "wan21_i2v"
    if name in _PIPELINE_CLASSES:
        return _PIPELINE_CLASSES[name]
    return _LANGUAGE_MODELS.get(str(_read_object(folder / "config.json").get("model_type")), "")


def _has_part(index: dict[str, Any], name: str) -> bool:
    return any(index.get(name) or ())


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or {} if there is none."""
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text("utf-8"))
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}
