"""Loading of a path's model family. Families are found by looking into this folder; nothing registers itself."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
import tempfile
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
from wfm_ds.models import hub, tiny
from wfm_ds.models.base import DiffusionModel, seeded
from wfm_ds.models.guardrail import Guardrail
from wfm_ds.models.loading import load_pipeline, read_json, stored_sequence_length
from wfm_ds.recipe.stated import FPS
from wfm_ds.seeds import derive_seed
from wfm_ds.user_class import import_class

TINY = "tiny:"
MAKE_TIMEOUT_S = 300.0
# What a family says of itself besides its methods (models/base.py).
STATED = ("family", "pipeline_classes", "conditioning_keys", "default_lora_targets", "required_parts", "block_classes")
# Pipelines that are asked for and cannot be a family yet: what one says of itself does not hold for them.
NOT_NOW = {
    **dict.fromkeys(
        ("LTX2Pipeline", "LTX2ImageToVideoPipeline"),
        "their network denoises sound beside the video, a second stream of latents, and their guidance takes four "
        "forwards; use Wan or Cosmos-Predict2.5",
    ),
    **dict.fromkeys(
        ("HunyuanVideo15Pipeline", "HunyuanVideo15ImageToVideoPipeline"),
        "they draw a single video of a prompt, guide by a part that diffusers calls experimental, and load no LoRA; "
        "use Wan or Cosmos-Predict2.5",
    ),
}


@cache
def families() -> dict[str, type[DiffusionModel]]:
    """Every family by name: the concrete subclasses of DiffusionModel in the modules of this folder."""
    found: dict[str, type[DiffusionModel]] = {}
    for info in pkgutil.iter_modules(models.__path__, f"{models.__name__}."):
        module = importlib.import_module(info.name)
        for member in vars(module).values():
            if not inspect.isclass(member) or not issubclass(member, DiffusionModel) or inspect.isabstract(member):
                continue
            first = found.setdefault(member.family, member)
            assert first is member, f"{member} and {first} are both called {member.family}"
    return found


def family_of(folder: Path, own: str | None = None) -> type[DiffusionModel]:
    """The family whose pipeline class the folder's model_index.json names. ModelError if there is none.

    `own`: the recipe's model.family, a class of the user's that is to serve this folder.
    """
    name = str(read_json(folder / "model_index.json").get("_class_name"))
    if own is not None:
        return own_family(own, folder, name)
    for family in families().values():
        if name in family.pipeline_classes:
            return family
    if name in NOT_NOW:
        raise ModelError(f"{folder}: pipelines of class {name} are not supported: {NOT_NOW[name]}")
    known = sorted(name for family in families().values() for name in family.pipeline_classes)
    raise ModelError(
        f"{folder}: pipelines of class {name} are not supported; supported: {', '.join(known)}, and those of a "
        "family of your own (model.family)"
    )


def own_family(path: str, folder: Path, pipeline_class: Any) -> type[DiffusionModel]:
    family: type[DiffusionModel] = import_class(path, DiffusionModel, key="model.family", error=ModelError)
    if lacking := [name for name in STATED if not hasattr(family, name)]:
        raise ModelError(f"model.family {path}: the class does not set {', '.join(lacking)}")
    if pipeline_class not in family.pipeline_classes:
        raise ModelError(
            f"model.family {path}: {folder} is a {pipeline_class}, and the class serves "
            f"{', '.join(family.pipeline_classes)}"
        )
    return family


def resolve(path: str | Path, own: str | None = None, revision: str | None = None, *, weights: bool = True) -> Path:
    """The folder of a supported pipeline: `path` itself; for `tiny:FAMILY`, one that is made once in the cache; for
    `owner/name` of the hub, its snapshot in the hub's cache, to which the files that it lacks are fetched.

    Of another folder it reads model_index.json only. ModelError if the folder is missing, unreadable, no pipeline, or
    of no known family, and where the hub refuses or is not reached. `own`: see family_of; `revision`: branch, tag or
    commit of the hub; `weights`: fetch these too.
    """
    folder = locate(path, own, revision)
    if hub.is_id(str(path)):
        return hub.complete(str(path), folder, read_json(folder / hub.INDEX), weights=weights)
    return folder


def locate(path: str | Path, own: str | None = None, revision: str | None = None) -> Path:
    """The folder as of `resolve`, of which nothing but model_index.json is sure to be there: a repository of the hub is
    not fetched before that says that it is supported."""
    if hub.is_id(str(path)):
        folder = hub.index_folder(str(path), revision)
        family_of(folder, own)
        return folder
    if revision is not None:
        raise ModelError(f"model.revision {revision} is for a repository of the hub, and {path} is none: remove it")
    if str(path).startswith(TINY):
        return cached_tiny(str(path).removeprefix(TINY))
    folder = Path(path).expanduser()
    if not os.path.isdir(folder):  # os.path: False, not an error, where we may not look
        if folder.name.endswith(hub.COSMOS_ORIGINAL):
            raise ModelError(
                f"{folder} is an original Cosmos checkpoint; convert it: {hub.convert_cosmos(str(folder), str(folder))}"
            )
        problem = "is a file" if os.path.isfile(folder) else "does not exist"
        raise ModelError(
            f"{folder} {problem}; model.path must name a diffusers pipeline folder on this disk, owner/name of the "
            f"hub, or tiny:FAMILY{hub.suggestion(str(folder))}"
        )
    if not os.path.isfile(folder / "model_index.json"):
        raise ModelError(
            f"{folder} has no model_index.json; model.path must name the top folder of a diffusers pipeline"
        )
    family_of(folder, own)
    return folder


def cached_tiny(family: str) -> Path:
    """The tiny pipeline's folder below $WFM_CACHE (unset: ~/.cache/wfm_ds). Several processes may make it at once."""
    root = Path(os.environ.get("WFM_CACHE") or "~/.cache/wfm_ds").expanduser() / "tiny" / tiny_key()
    folder = root / family
    if family in (*tiny.FAMILIES, *tiny.LANGUAGE_FAMILIES) and folder.is_dir():
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".making-") as making:
            make_tiny(family, Path(making) / "pipeline")
            publish(Path(making) / "pipeline", folder)
    except OSError as error:
        raise ModelError(f"{folder} cannot be written ({error}); set WFM_CACHE to a writable folder") from error
    return folder


def make_tiny(family: str, folder: Path) -> None:
    """`write_tiny`; in a process of its own where this one is a rank: transformers saves models on rank 0 alone."""
    if not torch.distributed.is_initialized():
        tiny.write_tiny(family, folder)
        return
    command = [sys.executable, "-m", tiny.__name__, family, str(folder)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=MAKE_TIMEOUT_S, check=False)
    if made.returncode:
        raise ModelError(made.stderr.strip().rpartition("\n")[2])


def tiny_key() -> str:
    """Changes whenever the bytes may: with our version, that of the libraries, and the code that writes the folder."""
    code = hashlib.blake2b(b"".join(path.read_bytes() for path in tiny.sources()), digest_size=4).hexdigest()
    return f"{wfm_ds.__version__}-diffusers-{diffusers.__version__}-transformers-{transformers.__version__}-{code}"


def publish(made: Path, folder: Path) -> None:
    """Rename `made` to `folder`, unless another process was faster: its bytes are the same, so ours can go."""
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def load(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    vae_dtype: torch.dtype = torch.float32,
    own_family: str | None = None,
    revision: str | None = None,
    max_sequence_length: int | None = None,
    prompt_template: str | None = None,
    guardrail: Guardrail = "stock",
    mapped: bool = False,
    fps: float = FPS,
    inputs: Collection[str] = (),
    embedded_guidance: float | None = None,
) -> DiffusionModel:
    """Load a pipeline, from safetensors only, with its denoiser in `dtype`, on `device`; offline, unless it is one of
    the hub that is not on this machine yet.

    vae_dtype: of the VAE's weights and of what it computes; latents and pixels are float32. Text encoders are bfloat16
    on CUDA beside a bfloat16 denoiser, else float32.
    own_family: a class of the user's that serves this pipeline, as `package.module:Class`.
    revision: branch, tag or commit of a pipeline of the hub.
    max_sequence_length, prompt_template: unset, what call.json in the folder says, else the stock pipeline's default.
    guardrail: "stock" keeps the safety checker of a pipeline that has one, "off" does without.
    mapped: leave the denoiser on the CPU and, if all its weights are stored in one dtype, in that one: pages of the
    files, shared by all processes of the machine, until an engine places them (placement.py).
    fps: frames a second of the videos that are made and trained on, for families whose network is told.
    inputs: what every sample is told besides text and frames, as data.inputs names it.
    embedded_guidance: the guidance scale that the network takes as an input; unset, as max_sequence_length.
    ModelError as for `resolve`, if a part is missing, damaged or does not fit its config, and for a guardrail to
    switch off, a prompt template to choose or a guidance to embed that the family does not have.
    """
    folder, device = resolve(path, own_family, revision), torch.device(device)
    family = family_of(folder, own_family)
    if guardrail == "off" and not family.has_guardrail:
        raise ModelError(f"{folder}: {family.family} has no guardrail to switch off; remove model.guardrail")
    if prompt_template is not None and prompt_template not in family.prompt_templates:
        raise ModelError(
            f"{folder}: {family.family} has no prompt template, its pipeline takes prompts as they are; remove "
            "model.prompt_template"
        )
    check_embedded_guidance(family, folder, embedded_guidance)
    family.check_folder(folder)
    length = max_sequence_length or stored_sequence_length(folder)
    low_precision_text = device.type == "cuda" and dtype == torch.bfloat16

    def dtype_of(part: str) -> torch.dtype:
        if part in family.denoiser_parts:
            return dtype
        if part == "vae":
            return vae_dtype
        return torch.bfloat16 if low_precision_text else torch.float32

    extra = family.extra_parts(folder, guardrail)
    pipeline = load_pipeline(
        folder,
        family.required_parts,
        dtype_of,
        extra,
        mapped=family.denoiser_parts if mapped else (),
        late=family.late_parts(folder),
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
    }
    try:
        inspect.signature(family).bind(pipeline, folder, **options)
    except TypeError as error:
        raise ModelError(
            f"model.family {own_family}: its constructor does not take what a family is given ({error}): take "
            "**options, and hand them on to super().__init__"
        ) from error
    return family(pipeline, folder, **options)


def check_embedded_guidance(family: type[DiffusionModel], folder: Path, scale: float | None) -> None:
    """ModelError for a guidance scale that the network in this folder does not take as an input."""
    if scale is not None and not family.takes_guidance(folder):
        raise ModelError(
            f"{folder}: the network of this {family.family} takes no guidance scale as an input; remove "
            "model.embedded_guidance, and set sampling.guidance_scale for guidance"
        )


def randomize(model: DiffusionModel, seed: int) -> None:
    """Give the bare denoiser, in place and in its dtype, the fresh weights that its config and the run's seed imply."""
    with seeded(derive_seed(seed, "denoiser_init")):
        for part in model.denoiser_parts:
            network: Any = getattr(model.pipeline, part)
            network.load_state_dict(type(network).from_config(network.config).state_dict())
