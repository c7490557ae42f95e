"""Finds the model family of a pipeline and loads the pipeline."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

import wfm_ds
from wfm_ds import models
from wfm_ds.errors import ModelError
from wfm_ds.models import tiny
from wfm_ds.models.assets import hub
from wfm_ds.models.assets.guardrail import Guardrail
from wfm_ds.models.assets.loading import load_pipeline, read_json, read_max_sequence_length
from wfm_ds.models.assets.local_folders import require_pipeline_index, require_tiny_name
from wfm_ds.models.base import DiffusionModel, temporary_seed
from wfm_ds.models.source_images import SourceSize
from wfm_ds.recipe.shared_defaults import DEFAULT_FPS, TINY_FOLDER, user_cache_folder
from wfm_ds.recipe.tiny import TINY_PREFIX
from wfm_ds.seeds import derive_seed
from wfm_ds.storage import atomic
from wfm_ds.storage.filesystem import is_repo_id
from wfm_ds.user_class import import_class

BUILD_TIMEOUT_S = 300.0
INSTANCE_ATTRIBUTES = ("pipeline", "path", "device")  # set by DiffusionModel's methods
# Class attributes that a family must define: those without a default in DiffusionModel and its base classes.
REQUIRED_ATTRIBUTES = tuple(
    name
    for parent in reversed(DiffusionModel.__mro__)
    for name in inspect.get_annotations(parent)
    if name not in INSTANCE_ATTRIBUTES and not hasattr(DiffusionModel, name)
)
# Pipelines that users requested, but that the interface of model families cannot support yet.
UNSUPPORTED_PIPELINES = {
    "LTX2ImageToVideoPipeline": "only the text-to-video pipeline of LTX-2 is: set _class_name to LTX2Pipeline, which "
    "has the same components",
    "HunyuanVideo15ImageToVideoPipeline": "only the text-to-video pipeline of HunyuanVideo-1.5 is; for image to video "
    "use Wan or Cosmos-Predict2.5",
}


@cache
def model_families() -> dict[str, type[DiffusionModel]]:
    """Return {family name: class} for all model families in this package."""
    by_name: dict[str, type[DiffusionModel]] = {}
    for info in pkgutil.iter_modules(models.__path__, f"{models.__name__}."):
        module = importlib.import_module(info.name)
        for member in vars(module).values():
            if not inspect.isclass(member) or not issubclass(member, DiffusionModel) or inspect.isabstract(member):
                continue
            first = by_name.setdefault(member.family, member)
            assert first is member, f"{member} and {first} are both called {member.family}"
    return by_name


def find_family(folder: Path, user_family: str | None = None) -> type[DiffusionModel]:
    """Return the model family that supports the pipeline class in model_index.json.

    user_family: a user's family class, as `package.module:Class`. If set, this class is returned.
    Raises ModelError if no family supports the pipeline class.
    """
    index = read_json(folder / "model_index.json")
    if unsafe := [name for name in index if not name.isidentifier()]:
        raise ModelError(f"{folder / 'model_index.json'}: {unsafe[0][:80]!r} is not a component name; correct the file")
    name = str(index.get("_class_name"))
    if user_family is not None:
        return import_user_family(user_family, folder, name)
    for family in model_families().values():
        if name in family.pipeline_classes:
            return family
    if name in UNSUPPORTED_PIPELINES:
        raise ModelError(f"{folder}: pipelines of class {name} are not supported: {UNSUPPORTED_PIPELINES[name]}")
    known = sorted(name for family in model_families().values() for name in family.pipeline_classes)
    raise ModelError(
        f"{folder}: pipelines of class {name} are not supported; supported: {', '.join(known)}, or your own "
        "family (model.family)"
    )


def import_user_family(path: str, folder: Path, pipeline_class: Any) -> type[DiffusionModel]:
    family: type[DiffusionModel] = import_class(path, DiffusionModel, key="model.family", error=ModelError)
    if missing := [name for name in REQUIRED_ATTRIBUTES if not hasattr(family, name)]:
        raise ModelError(f"model.family {path}: the class does not set {', '.join(missing)}")
    if pipeline_class not in family.pipeline_classes:
        raise ModelError(
            f"model.family {path}: {folder} is a {pipeline_class}, but the class supports "
            f"{', '.join(family.pipeline_classes)}"
        )
    return family


def resolve_pipeline(
    path: str | Path, user_family: str | None = None, revision: str | None = None, *, weights: bool = True
) -> Path:
    """Return the folder of a supported pipeline, after downloading its missing files.

    path: a local folder, `tiny:FAMILY` for a tiny pipeline (created in the cache), or `owner/name` on the Hub.
    user_family: the recipe's model.family. weights: whether to download weights.
    Raises ModelError if the folder is missing, unreadable or not a supported pipeline, or if the download fails.
    """
    folder = locate_pipeline(path, user_family, revision)
    if is_repo_id(str(path)):
        return hub.download_components(str(path), folder, read_json(folder / hub.INDEX), weights=weights)
    return folder


def locate_pipeline(path: str | Path, user_family: str | None = None, revision: str | None = None) -> Path:
    """Return the same folder as `resolve_pipeline`, but download only model_index.json from the Hub."""
    if is_repo_id(str(path)):
        folder = hub.download_index(str(path), revision)
        find_family(folder, user_family)
        return folder
    if revision is not None:
        raise ModelError(f"model.revision {revision} needs a repository of the Hub, but {path} is not one: remove it")
    if str(path).startswith(TINY_PREFIX):
        require_tiny_name(str(path), is_language_model=False)
        return get_tiny_folder(str(path).removeprefix(TINY_PREFIX))
    folder = require_pipeline_index(path)
    find_family(folder, user_family)
    return folder


def get_tiny_folder(family: str) -> Path:
    """Return the folder of a tiny model in $WFM_CACHE (default ~/.cache/wfm_ds), and create it if it is missing.

    Several processes may call this function at the same time.
    """
    root = user_cache_folder() / TINY_FOLDER / tiny_cache_key()
    folder = root / family
    if family in (*tiny.FAMILIES, *tiny.LANGUAGE_FAMILIES) and folder.is_dir():
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with atomic.temporary_folder(root) as making:
            build_tiny_folder(family, making / "pipeline")
            publish_folder(making / "pipeline", folder)
    except OSError as error:
        raise ModelError(f"{folder} cannot be written ({error}); set WFM_CACHE to a writable folder") from error
    return folder


def build_tiny_folder(family: str, folder: Path) -> None:
    # In distributed runs, transformers saves files only on rank 0, so a subprocess writes them.
    if not torch.distributed.is_initialized():
        tiny.write_tiny_model(family, folder)
        return
    command = [sys.executable, "-m", "wfm_ds", "models", "tiny", family, str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    if result.returncode:
        raise ModelError(result.stderr.strip().rpartition("\n")[2])


def tiny_cache_key() -> str:
    code = hashlib.blake2b(b"".join(path.read_bytes() for path in tiny.source_files()), digest_size=4).hexdigest()
    return f"{wfm_ds.__version__}-diffusers-{diffusers.__version__}-transformers-{transformers.__version__}-{code}"


def publish_folder(source: Path, folder: Path) -> None:
    """Rename `source` to `folder`. Does nothing if another process has already created `folder`."""
    try:
        source.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    vae_dtype: torch.dtype = torch.float32,
    user_family: str | None = None,
    revision: str | None = None,
    max_sequence_length: int | None = None,
    prompt_template: str | None = None,
    guardrail: Guardrail = "stock",
    mapped: bool = False,
    fps: float = DEFAULT_FPS,
    inputs: Collection[str] = (),
    embedded_guidance: float | None = None,
    source_size: SourceSize = "target",
) -> DiffusionModel:
    """Load a pipeline to `device`, with its denoiser in `dtype`. Downloads missing files from the Hub.

    vae_dtype: dtype of the VAE's weights and computation. Latents and pixels are always float32. Text encoders are
    bfloat16 on CUDA if the denoiser is bfloat16, and otherwise float32.
    user_family: a user's family class, as `package.module:Class`. revision: branch, tag or commit on the Hub.
    max_sequence_length, prompt_template, embedded_guidance: None selects the value in call.json or, if it is missing,
    the default of the diffusers pipeline.
    guardrail: "stock" keeps the pipeline's safety checker, "off" disables it.
    mapped: keep the denoiser memory-mapped on the CPU in its stored dtype, shared by all processes of the machine.
    fps: frames per second of all videos. inputs: names of the inputs that every sample provides (data.inputs in
    recipes). source_size: size of source images (data.source_size in recipes).
    Raises ModelError if files are missing or damaged, or if the pipeline or a setting is not supported.
    """
    folder, device = resolve_pipeline(path, user_family, revision), torch.device(device)
    family = find_family(folder, user_family)
    if guardrail == "off" and not family.has_guardrail:
        raise ModelError(f"{folder}: {family.family} has no guardrail; remove model.guardrail")
    if prompt_template is not None and prompt_template not in family.prompt_templates:
        raise ModelError(
            f"{folder}: {family.family} has no prompt template {prompt_template!r}; remove model.prompt_template"
        )
    check_embedded_guidance(family, folder, embedded_guidance)
    family.check_folder(folder)
    length = max_sequence_length or read_max_sequence_length(folder)
    low_precision_text = device.type == "cuda" and dtype == torch.bfloat16

    def component_dtype(part: str) -> torch.dtype:
        if part in family.denoiser_components:
            return dtype
        if part == "vae":
            return vae_dtype
        return torch.bfloat16 if low_precision_text else torch.float32

    extra = family.extra_components(folder, guardrail)
    pipeline = load_pipeline(
        folder,
        family.required_components,
        component_dtype,
        extra,
        mapped=family.denoiser_components if mapped else (),
        overrides=family.component_overrides(folder),
    )
    options: dict[str, Any] = {
        "dtype": dtype,
        "device": device,
        "max_sequence_length": length,
        "prompt_template": prompt_template,
        "leave_denoiser": mapped,
        "fps": fps,
        "inputs": inputs,
        "embedded_guidance": embedded_guidance,
        "source_size": source_size,
    }
    try:
        inspect.signature(family).bind(pipeline, folder, **options)
    except TypeError as error:
        raise ModelError(
            f"model.family {user_family}: its constructor does not accept the arguments of a family ({error}): accept "
            "**options and pass them to super().__init__"
        ) from error
    return family(pipeline, folder, **options)


def check_embedded_guidance(family: type[DiffusionModel], folder: Path, scale: float | None) -> None:
    """Raise ModelError if `scale` is set and the network in this folder has no embedded guidance."""
    if scale is not None and not family.has_embedded_guidance(folder):
        raise ModelError(
            f"{folder}: this {family.family} network does not support embedded guidance; remove "
            "model.embedded_guidance and set sampling.guidance_scale"
        )


def randomize_denoiser(model: DiffusionModel, seed: int) -> None:
    """Replace the denoiser's weights by random initial weights of the same dtype."""
    with temporary_seed(derive_seed(seed, "denoiser_init")):
        for part in model.denoiser_components:
            network: Any = getattr(model.pipeline, part)
            network.load_state_dict(type(network).from_config(network.config).state_dict())
