"""Hub repositories of the supported released models in diffusers' format, and hints for error messages."""

from __future__ import annotations

import difflib

RELEASED_REPOS = {  # supported repositories in diffusers' format, with the branch if it is not main
    "stabilityai/stable-diffusion-3.5-medium": None,
    "stabilityai/stable-diffusion-3.5-large": None,
    "stabilityai/stable-diffusion-3-medium-diffusers": None,
    "black-forest-labs/FLUX.2-dev": None,
    "black-forest-labs/FLUX.2-klein-base-4B": None,
    "black-forest-labs/FLUX.2-klein-base-9B": None,
    "black-forest-labs/FLUX.2-klein-4B": None,
    "black-forest-labs/FLUX.2-klein-9B": None,
    "black-forest-labs/FLUX.1-Kontext-dev": None,
    "Qwen/Qwen-Image": None,
    "Qwen/Qwen-Image-2512": None,
    "Qwen/Qwen-Image-Edit": None,
    "Qwen/Qwen-Image-Edit-2509": None,
    "Qwen/Qwen-Image-Edit-2511": None,
    "Tongyi-MAI/Z-Image": None,
    "Tongyi-MAI/Z-Image-Turbo": None,
    "nvidia/Cosmos-Predict2.5-2B": "diffusers/base/post-trained",
    "nvidia/Cosmos3-Edge": None,
    "nvidia/Cosmos3-Nano": None,
    "nvidia/Cosmos3-Super": None,
    "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers": None,
    "Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers": None,
    "Efficient-Large-Model/SANA-Video_2B_480p_diffusers": None,
    "Efficient-Large-Model/SANA-WM_bidirectional-diffusers": None,
    "Lightricks/LTX-2": None,
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": None,
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v": None,
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": None,
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": None,
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": None,
    "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers": None,
    "Wan-AI/Wan2.1-VACE-1.3B-diffusers": None,
    "Wan-AI/Wan2.1-VACE-14B-diffusers": None,
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": None,
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": None,
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": None,
}
FEW_STEP_REPOS = {  # repositories of models that were distilled to a number of steps without guidance
    "black-forest-labs/FLUX.2-klein-4B": 4,
    "black-forest-labs/FLUX.2-klein-9B": 4,
    "Tongyi-MAI/Z-Image-Turbo": 8,
}
COSMOS_CHECKPOINT_SUFFIX = "_ema_bf16.pt"  # file name suffix of the original Cosmos checkpoints


def cosmos_conversion_command(file: str, name: str) -> str:
    """Return the shell command that converts an original Cosmos checkpoint to diffusers.

    file: path of the checkpoint. name: its path or repository name. The model is 14B if `name` contains "14B",
    otherwise 2B. It has actions if `file` contains "action-cond".
    """
    if "action-cond" in file:
        return f"wfm convert {file} OUT --base COSMOS_FOLDER (docs/models/cosmos_predict25_actions.md)"
    size = "14B" if "14B" in name else "2B"
    return (
        f"python convert_cosmos_to_diffusers.py --transformer_type Cosmos-2.5-Predict-Base-{size} "
        f"--transformer_ckpt_path {file} --vae_type wan2.1 --output_path OUT --save_pipeline (a script of diffusers)"
    )


def closest_released_repo(path: str) -> str | None:
    """Return the released repository with the name most similar to `path`, or None if no name is similar."""
    by_name = {_last_part(repo).lower(): repo for repo in RELEASED_REPOS}
    near = difflib.get_close_matches(_last_part(path).lower(), by_name, n=1, cutoff=0.7)
    return by_name[near[0]] if near else None


def suggest_released_repo(path: str) -> str:
    """Return an error-message hint with the released repository most similar to `path`, or "" if none is similar."""
    repo = closest_released_repo(path)
    if repo is None or repo == path:
        return ""
    at = f" model.revision={RELEASED_REPOS[repo]}" if RELEASED_REPOS[repo] is not None else ""
    return f"; for the released model: model.path={repo}{at}"


def _last_part(path: str) -> str:
    return path.rpartition("/")[2]
