"""`wfm answer MODEL --image a.png "question"`: ask a vision-language model a question."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from wfm_ds.cli.sampling_options import parse_positive
from wfm_ds.errors import ModelError, UserError
from wfm_ds.program import CommandParser

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"


def parser() -> CommandParser:
    p = CommandParser(
        description="Ask a vision-language model about images and videos.",
        epilog='Example: %(prog)s outputs/run/safetensors/step_100 --image a.png "what is this?"',
    )
    p.add_argument(
        "model",
        help="an export (safetensors/step_N or its lora/), a model folder, owner/name on the Hub, or tiny:FAMILY",
    )
    p.add_argument("question", help="use <image> and <video> to place the files; otherwise they come first")
    p.add_argument("--image", action="append", default=[], metavar="FILE", help="image file; repeat for several")
    p.add_argument("--video", action="append", default=[], metavar="FILE", help="video file; repeat for several")
    p.add_argument("--system", metavar="TEXT", help="system message (default: from the chat template)")
    p.add_argument(
        "--tokens", type=parse_positive, default=256, metavar="N", help="maximum tokens of the answer (default 256)"
    )
    p.add_argument("--revision", help="branch, tag or commit on the Hub (default main)")
    p.add_argument("--dtype", choices=["bfloat16", "float32"], help="default: bfloat16 on a GPU, else float32")
    p.add_argument("--device", help="default: cuda if available, else cpu")
    p.key_options = {"model.path": "MODEL", "model.revision": "--revision"}
    return p


def run(args: argparse.Namespace) -> None:
    sys.stdout.write(generate_answer(args) + "\n")


def generate_answer(args: argparse.Namespace) -> str:
    from wfm_ds.language.annotations import BadConversation, Conversation, parse_conversation

    # Check the files before importing transformers, which takes seconds.
    for file in (*args.image, *args.video):
        if not Path(file).is_file():
            raise UserError(f"{file} is not a file")
    base, adapter = resolve_model(args.model)
    turns = [{"from": "human", "value": args.question}, {"from": "gpt", "value": ""}]
    row = {"images": args.image, "videos": args.video, "conversations": turns}
    try:
        conversation = parse_conversation(row, "question", system_prompt=args.system)
    except BadConversation as error:
        raise UserError(str(error)) from error
    from wfm_ds.engine.preparation import DTYPES
    from wfm_ds.language import model as language_model
    from wfm_ds.language.media import MediaReader
    from wfm_ds.language.packed_sequences import ConversationReader
    from wfm_ds.language.renderer import Renderer
    from wfm_ds.models.assets.loading import select_device
    from wfm_ds.recipe.data import DataRecipe

    device = select_device(args.device)
    dtype = DTYPES[args.dtype or ("bfloat16" if device.type == "cuda" else "float32")]
    model = language_model.load_language_model(base, dtype, args.revision)
    settings = DataRecipe.model_validate({"kind": "llava", "path": "none"})
    reader = ConversationReader(
        Renderer(model.tokenizer),
        MediaReader(model.image_processor, settings),
        has_frame_times=model.has_frame_times,
        max_tokens=sys.maxsize,
        too_long="skip",
    )
    try:
        sample = reader.read_question(Conversation("question", conversation.turns[:-1]))
    except BadConversation as error:
        raise UserError(str(error)) from error
    network: Any = model.network
    if adapter is not None:
        network = add_adapter(network, adapter)
    return decode_answer(network.to(device, dtype).eval(), model, sample, args.tokens, device)


def resolve_model(path: str) -> tuple[str, Path | None]:
    """Return (base model, adapter folder) if `path` is a PEFT adapter, otherwise (`path`, None).

    Raises ModelError if a local folder is not a model, or if the adapter does not name its base model.
    """
    from wfm_ds.recipe.tiny import TINY_PREFIX
    from wfm_ds.storage.filesystem import is_repo_id

    folder = Path(path).expanduser()
    if not (folder / ADAPTER_CONFIG).is_file():
        if not path.startswith(TINY_PREFIX) and not is_repo_id(path) and not (folder / CONFIG).is_file():
            raise ModelError(
                f"{folder} has no {CONFIG}: pass an export, the folder of a vision-language model, owner/name on the "
                "Hub, or tiny:qwen25vl"
            )
        return path, None
    from wfm_ds.models.assets.loading import read_json

    base = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(base, str):
        raise ModelError(
            f"{folder / ADAPTER_CONFIG} names no base model: write its folder or Hub id into base_model_name_or_path"
        )
    return base, folder


def add_adapter(network: Any, folder: Path) -> Any:
    import peft
    from safetensors import SafetensorError

    from wfm_ds.export.lora_file import PEFT_FILE, read_tensors
    from wfm_ds.export.lora_settings import check_settings, select_layers
    from wfm_ds.models.assets.loading import read_json
    from wfm_ds.storage.filesystem import shorten_error

    settings = check_settings(read_json(folder / ADAPTER_CONFIG), str(folder / ADAPTER_CONFIG))
    tensors, _ = read_tensors(folder / PEFT_FILE)
    layers = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in tensors if ".lora_" in name}
    try:
        config = peft.LoraConfig(**select_layers(settings, layers))
        return peft.PeftModel.from_pretrained(network, str(folder), config=config)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise ModelError(f"{folder} does not fit its base model ({shorten_error(error)})") from error


def decode_answer(network: Any, model: Any, sample: Any, max_tokens: int, device: Any) -> str:
    import torch

    from wfm_ds.language.packed_sequences import stack_media

    ids = torch.tensor([sample.tokens.ids], device=device)
    media = {name: tensor.to(device) for name, tensor in stack_media([sample]).items()}
    seconds = {"second_per_grid_ts": torch.tensor(sample.seconds_per_time)} if sample.seconds_per_time else {}
    with torch.no_grad():
        output = network.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=sample.token_types(model.pad_ids).to(device),
            max_new_tokens=max_tokens,
            do_sample=False,
            **media,
            **seconds,
        )
    return str(model.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)).strip()
