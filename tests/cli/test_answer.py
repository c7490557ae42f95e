"""`wfm answer`: the same answers as transformers' generate, and one-line errors for bad input."""

import json

import peft
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.auto.image_processing_auto import AutoImageProcessor  # transformers 5.17 hides it

from clips import write_clip
from wfm_ds.cli.main import main
from wfm_ds.models.registry import get_tiny_folder
from wfm_ds.models.tiny.tokenizers import VISION_TEMPLATE


def ask(words):
    return main(["answer", *words])


@pytest.fixture
def media(tmp_path):
    Image.new("RGB", (56, 56), "red").save(tmp_path / "a.png")
    write_clip(tmp_path / "clip.mp4", size=(64, 64))
    return tmp_path


@pytest.mark.parametrize("family", ["qwen25vl", "qwen3vl"])
def test_an_answer_is_the_likeliest_text(media, capsys, family):
    assert ask([f"tiny:{family}", "--image", str(media / "a.png"), "the square is", "--tokens", "5"]) == 0
    said = capsys.readouterr().out
    folder = get_tiny_folder(family)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    with Image.open(media / "a.png") as picture:
        size = {"shortest_edge": 3136, "longest_edge": 1003520}
        inputs = processor(images=[picture.convert("RGB")], size=size, return_tensors="pt")
    count = int(inputs["image_grid_thw"].prod()) // processor.merge_size**2
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "\nthe square is"}]}],
        tokenize=False,
        add_generation_prompt=True,
    )
    pad = "<|image_pad|>"
    ids = torch.tensor([tokenizer(text.replace(pad, pad * count), add_special_tokens=False)["input_ids"]])
    types = (ids == tokenizer.convert_tokens_to_ids(pad)).long()
    model = AutoModelForImageTextToText.from_pretrained(folder)
    with torch.no_grad():
        found = model.generate(input_ids=ids, mm_token_type_ids=types, max_new_tokens=5, do_sample=False, **inputs)
    assert VISION_TEMPLATE.format("image") in text
    assert said == tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True).strip() + "\n"


def test_an_adapter_finds_its_base(media, capsys):
    network = AutoModelForImageTextToText.from_pretrained(get_tiny_folder("qwen25vl"))
    config = peft.LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False)
    network = peft.get_peft_model(network, config)
    network.peft_config["default"].base_model_name_or_path = str(get_tiny_folder("qwen25vl"))
    network.save_pretrained(media / "lora")
    asked = ["--video", str(media / "clip.mp4"), "what is it", "--tokens", "4"]
    assert ask([str(media / "lora"), *asked]) == ask(["tiny:qwen25vl", *asked]) == 0
    with_adapter, without = capsys.readouterr().out.splitlines()[:2]
    assert with_adapter != without


def test_adapter_settings_that_are_invalid_or_hang_are_one_line_errors(media, capsys):
    folder = get_tiny_folder("qwen25vl")
    network = AutoModelForImageTextToText.from_pretrained(folder)
    network = peft.get_peft_model(network, peft.LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False))
    network.save_pretrained(media / "lora")
    file = media / "lora" / "adapter_config.json"
    settings = json.loads(file.read_text()) | {"base_model_name_or_path": str(folder)}
    file.write_text(json.dumps(settings))
    assert ask([str(media / "lora"), "?", "--tokens", "2"]) == 0
    expected = capsys.readouterr().out
    for change in (
        {"target_modules": r"((\w|\.)+)+!"},
        {"layers_pattern": r"((\w|\.)+)+!", "layers_to_transform": [0]},
    ):
        file.write_text(json.dumps(settings | change))
        assert ask([str(media / "lora"), "?", "--tokens", "2"]) == 0  # the file's tensors say which layers it has
        assert capsys.readouterr().out == expected
    for change, message in (
        ({"r": "4"}, "adapter_config.json: r: "),
        ({"lora_alpha": [8]}, "adapter_config.json: lora_alpha: "),
        ({"r": 3}, "does not fit its base model"),
        ({"alpha_pattern": {"(a+)+b": 3}}, "is too complex"),
    ):
        file.write_text(json.dumps(settings | change))
        assert ask([str(media / "lora"), "?"]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    (media / "lora" / "adapter_model.safetensors").write_bytes(b"x")
    assert ask([str(media / "lora"), "?"]) == 2


def test_invalid_questions_are_one_line_errors(media, capsys):
    assert ask(["tiny:qwen25vl", "--image", str(media / "none.png"), "?"]) == 2
    assert "none.png" in capsys.readouterr().err
    assert ask(["tiny:qwen25vl", "<image> ?"]) == 2
    assert "1 <image> tags, 0 images" in capsys.readouterr().err
    assert ask([str(media), "?"]) == 2
    assert "has no config.json" in capsys.readouterr().err
