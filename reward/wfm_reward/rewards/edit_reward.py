"""EditReward (arXiv 2509.26346): human preference score of an edited image from a Qwen2.5-VL with two reward heads.

The network, its preprocessing and its weights follow github.com/TIGER-AI-Lab/EditReward edb027e (model/
qwen2_5_vl_trainer.py, inference_edit.py, config/EditReward-MiMo-VL-7B-SFT-2508.yaml).
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from wfm_reward.base import UNBOUNDED, ItemReward, MediaItem, RewardError, Score
from wfm_reward.rewards._weights import (
    load_pretrained,
    load_torch_file,
    resolve_file,
    to_pil_images,
    torch_dtype,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

REWARD_TOKEN = "<|Reward|>"  # its hidden state is the input of the heads
IMAGE_PIXELS = 256 * 28 * 28  # every image is resized to about this size
HEAD_WIDTHS = (1024, 16, 2)  # output: mean and log std of the predicted preference
# {head: (file in the authors' code, name of the prompt)}, and the text that follows both prompts
PROMPTS = {
    "instruction": ("EditReward/dataset/prompts.py", "INSTRUCTION_EDIT_FOLLOWING"),
    "quality": ("EditReward/dataset/prompts.py", "INSTRUCTION_EDIT_QUALITY"),
}
SUFFIX = ("EditReward/dataset/data_collator_qwen_edit.py", "prompt_with_special_token")


class EditReward(ItemReward):
    """EditReward: mean of two predicted preferences, without limits: instruction following and visual quality.

    Both are also reported as the parts `instruction` and `quality`. The network reads the published prompts, so clone
    the authors' code (github.com/TIGER-AI-Lab/EditReward) and set the option `code` to its folder. Only the prompts of
    the code are read. For the other published checkpoint set `model` to TIGER-Lab/EditReward-Qwen2.5-VL-7B with its
    file, and `base` to Qwen/Qwen2.5-VL-7B-Instruct.
    """

    name = primary_output = "edit_reward"
    backbone = "Qwen2.5-VL"
    media_types = frozenset({"image"})
    outputs: ClassVar = {"edit_reward": UNBOUNDED, "instruction": UNBOUNDED, "quality": UNBOUNDED}
    sees_images = True
    hub_files: ClassVar = {"model": "file", "base": "processor"}
    download_note = "clone github.com/TIGER-AI-Lab/EditReward, for its prompts, to the folder in the option code"

    def __init__(
        self,
        device: str = "cpu",
        *,
        code: str,
        model: str = "TIGER-Lab/EditReward-MiMo-VL-7B-SFT-2508:model.safetensors",
        base: str = "XiaomiMiMo/MiMo-VL-7B-SFT-2508",
        dtype: str = "bfloat16",
        **options: Any,
    ) -> None:
        """code: folder with the authors' code. model: the published weights, as a local .safetensors or .pth file or
        OWNER/REPOSITORY:FILE on the Hub. base: folder or Hub name of the base model, for its configuration, tokenizer
        and image processor. dtype: of the base model; the heads are float32.
        """
        super().__init__(device, **options)
        self.code, self.model, self.base, self.dtype = code, model, base, dtype

    def load(self) -> None:
        dtype = torch_dtype(self.name, self.dtype)
        folder = Path(self.code).expanduser()
        suffix = self._read_text(folder, *SUFFIX)
        self._prompts = {head: self._read_text(folder, *source) + suffix for head, source in PROMPTS.items()}
        config = load_pretrained(self.name, "the base model", self.base, self._load_preprocessing)
        self._network, self._heads = load_pretrained(
            self.name, "the model", self.model, lambda address: build_network(config, read_weights(address), dtype)
        )
        self._network.to(self.device)
        self._heads.to(self.device)

    def _load_preprocessing(self, address: str) -> Any:
        """Load the tokenizer, the chat template and the image processor. Returns the configuration of the network."""
        from transformers import AutoConfig, AutoTokenizer, ProcessorMixin
        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        self._tokenizer = AutoTokenizer.from_pretrained(address)
        self._tokenizer.add_special_tokens({"additional_special_tokens": [REWARD_TOKEN]})
        if template := ProcessorMixin.get_processor_dict(address)[0].get("chat_template"):
            self._tokenizer.chat_template = template
        self._image_processor = AutoImageProcessor.from_pretrained(address, backend="pil")
        return AutoConfig.from_pretrained(address)

    def _read_text(self, folder: Path, file: str, name: str) -> str:
        try:
            return read_constant(folder / file, name)
        except (OSError, SyntaxError, KeyError) as error:
            raise RewardError(
                f"reward {self.name}: {name} cannot be read from {folder / file}: set the option code to a clone of "
                "github.com/TIGER-AI-Lab/EditReward"
            ) from error

    def score_item(self, item: MediaItem) -> Score:
        import torch

        source = item.images.get("source")
        if source is None:
            return item.fail("the sample has no source image")
        images = to_pil_images(item.frames[:1])
        size = {"shortest_edge": IMAGE_PIXELS, "longest_edge": IMAGE_PIXELS}
        pixels = self._image_processor(to_pil_images(source[None]) + images, size=size, return_tensors="pt")
        with torch.inference_mode():
            parts = {
                head: self._rate(self._heads[f"head_{i}"], prompt.format(text_prompt=item.prompt), pixels)
                for i, (head, prompt) in enumerate(self._prompts.items())
            }
        return item.score(sum(parts.values()) / len(parts), **parts)

    def _rate(self, head: nn.Module, prompt: str, pixels: Mapping[str, Tensor]) -> float:
        """Return the mean that a head predicts for this prompt and the images (source, result)."""
        import torch

        ids = self._encode_prompt(prompt, pixels["image_grid_thw"])
        reward_id = self._tokenizer.convert_tokens_to_ids(REWARD_TOKEN)
        # The published network was trained with positions that count all tokens, not with Qwen2.5-VL's image positions.
        positions = torch.arange(ids.shape[1], device=self.device).expand(3, 1, -1)
        hidden = self._network(
            input_ids=ids,
            position_ids=positions,
            pixel_values=pixels["pixel_values"].to(self.device),
            image_grid_thw=pixels["image_grid_thw"].to(self.device),
            use_cache=False,
        ).last_hidden_state
        (outputs,) = head(hidden[ids == reward_id].float())
        return float(outputs[0])

    def _encode_prompt(self, prompt: str, grids: Tensor) -> Tensor:
        """Return the token ids [1,L] of a message with two images and this prompt.

        grids: number of patches of each image along time, height and width, [2,3].
        """
        import torch

        content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": prompt}]
        message = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        config = self._network.config
        image_id, merged_patches = config.image_token_id, config.vision_config.spatial_merge_size**2
        counts = (grids.prod(-1) // merged_patches).tolist()
        ids: list[int] = []
        for token in self._tokenizer(message)["input_ids"]:
            ids += [token] * (counts.pop(0) if token == image_id and counts else 1)
        if counts:
            raise RewardError(f"reward {self.name}: the chat template of {self.base} has no places for two images")
        return torch.tensor([ids], device=self.device)


def read_constant(path: Path, name: str) -> str:
    """Return the text that a Python file assigns to `name`, without running the file.

    Raises OSError, SyntaxError or KeyError if there is none.
    """
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=target)], value=ast.Constant(value=str(text))) if target == name:
                return text
    raise KeyError(name)


def read_weights(address: str) -> dict[str, Tensor]:
    """Read the weights of a .safetensors or .pth file. Raises OSError or ValueError if that fails."""
    path = resolve_file(address)
    if not path.endswith(".safetensors"):
        return load_torch_file(path, mmap=True)
    from safetensors.torch import load_file

    return load_file(path)


def build_network(config: Any, weights: Mapping[str, Tensor], dtype: Any) -> tuple[Any, nn.ModuleDict]:
    """Return a Qwen2.5-VL without language head, and the reward heads.

    weights: names start with `model.` or `rm_heads.`; other weights are ignored. Raises ValueError or RuntimeError if
    weights are missing or have wrong shapes.
    """
    from torch import nn
    from transformers import Qwen2_5_VLModel

    groups: dict[str, dict[str, Tensor]] = {"model": {}, "rm_heads": {}}
    for key, weight in weights.items():
        group, _, name = key.partition(".")
        if group in groups:
            groups[group][name] = weight
    embedding = groups["model"].get("language_model.embed_tokens.weight")
    if embedding is None:
        raise ValueError("it has no weights model.language_model")
    config.text_config.vocab_size = len(embedding)  # the authors resize it to the tokenizer
    network, info = Qwen2_5_VLModel.from_pretrained(
        None, config=config, state_dict=groups["model"], dtype=dtype, output_loading_info=True
    )
    if wrong := sorted({*info["missing_keys"], *info["unexpected_keys"]}):
        raise ValueError(f"{len(wrong)} weights are missing or unknown, e.g. {wrong[0]}")
    width, (first, second, last) = config.text_config.hidden_size, HEAD_WIDTHS
    heads = nn.ModuleDict(
        {
            f"head_{i}": nn.Sequential(
                nn.Linear(width, first),
                nn.ReLU(),
                nn.Dropout(),
                nn.Linear(first, second),
                nn.ReLU(),
                nn.Linear(second, last),
            )
            for i in range(len(PROMPTS))
        }
    )
    heads.load_state_dict(groups["rm_heads"])
    return network, heads.float().eval()
