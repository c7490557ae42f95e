"""Packed rows: the forward of a row equals transformers' forward of each conversation alone."""

import copy
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from clips import write_clip
from conversations import DATA, reader_of, samples_of
from wfm_ds.demos.squares_data import write_squares
from wfm_ds.errors import ModelError
from wfm_ds.language import attention
from wfm_ds.language import model as language_model
from wfm_ds.language.annotations import BadConversation, MediaReference, parse_conversation
from wfm_ds.language.media import MediaReader
from wfm_ds.language.packed_sequences import SequencePacker
from wfm_ds.language.renderer import IGNORE_INDEX
from wfm_ds.models.registry import get_tiny_folder
from wfm_ds.models.tiny import write_tiny_model
from wfm_ds.recipe.data import DataRecipe


@pytest.fixture(scope="module")
def squares(tmp_path_factory):
    folder = tmp_path_factory.mktemp("squares") / "data"
    write_squares(folder)
    write_clip(folder / "clip.mp4", size=(64, 64))
    return folder


@pytest.fixture(scope="module", params=["qwen25vl", "qwen3vl"])
def model(request):
    return language_model.load_language_model(str(get_tiny_folder(request.param)), torch.float32)


def video_sample(model, squares):
    row = {"conversations": [{"from": "human", "value": "<video> ?"}, {"from": "gpt", "value": "a robot moving left"}]}
    return reader_of(model).read(parse_conversation({**row, "video": str(squares / "clip.mp4")}, "v"))


def maker_of(model, kinds=(), **options):
    blanks = [reader_of(model).blank_sample(kind) for kind in kinds]
    return SequencePacker(model.rotary_positions, blanks, **{"by_sample": False, **options})


def by_transformers(model, sample):
    """Return logits [L, V] and loss of one conversation, with transformers' own positions, mask and loss."""
    media = maker_of(model).pack_samples([sample]).media
    with torch.no_grad():
        output = model.network(
            input_ids=torch.tensor([sample.tokens.ids]),
            attention_mask=torch.ones(1, len(sample.tokens), dtype=torch.long),
            mm_token_type_ids=sample.token_types(model.pad_ids),
            labels=torch.tensor([sample.tokens.labels]),
            **({"second_per_grid_ts": torch.tensor(sample.seconds_per_time)} if sample.seconds_per_time else {}),
            **media,
        )
    return output.logits[0], output.loss


def test_a_row_of_one_conversation_has_the_loss_of_transformers(model, squares):
    for sample in [*samples_of(model, squares), video_sample(model, squares)]:
        row = maker_of(model).pack_samples([sample])
        logits, loss = by_transformers(model, sample)
        with torch.no_grad():
            found = model.predict(row)
        assert float(found.losses.mean()) == pytest.approx(float(loss), rel=1e-6)
        right = logits[:-1].argmax(-1)[row.label_positions] == row.targets
        assert torch.equal(found.hits, right.float())


def test_conversations_in_a_row_do_not_see_each_other(model, squares):
    samples = [*samples_of(model, squares), video_sample(model, squares)]
    row = maker_of(model).pack_samples(samples)
    alone = torch.cat([by_transformers(model, sample)[0] for sample in samples])
    with torch.no_grad():
        together = model.network(
            input_ids=row.input_ids, position_ids=row.position_ids, use_cache=False, **row.media
        ).logits[0]
        losses = model.predict(row).losses
    assert (together - alone).abs().max() < 3e-6 * alone.abs().max()
    assert together.shape[0] == sum(len(sample.tokens) for sample in samples)
    # The number of losses shows that no loss is computed across the border of two conversations.
    assert len(losses) == sum(label != IGNORE_INDEX for sample in samples for label in sample.tokens.labels)


def test_attention_without_a_mask_has_the_losses_and_gradients_of_that_with_one(model, squares):
    by_segments = copy.copy(model)
    by_segments.network = by_segments.forward_module = copy.deepcopy(model.network)
    by_segments.uses_segments = attention.install_segment_attention(by_segments.network)
    assert by_segments.uses_segments
    row = maker_of(model).pack_samples([*samples_of(model, squares), video_sample(model, squares)])
    assert len(row.segments) == 4
    found = {}
    for name, one in (("mask", model), ("segments", by_segments)):
        one.network.zero_grad()
        losses = one.predict(row).losses
        losses.sum().backward()
        found[name] = losses.detach(), {n: p.grad for n, p in one.network.named_parameters()}
    assert torch.allclose(found["segments"][0], found["mask"][0], rtol=1e-5, atol=1e-5)
    for name, gradient in found["mask"][1].items():
        assert torch.allclose(found["segments"][1][name], gradient, rtol=1e-4, atol=1e-5), name
    model.network.zero_grad()


def test_gradients_of_a_row_are_those_of_its_conversations(model, squares):
    samples, maker = samples_of(model, squares), maker_of(model)

    def gradients(rows):
        model.network.zero_grad()
        for row in rows:
            model.predict(row).losses.sum().backward()
        return {name: p.grad.clone() for name, p in model.network.named_parameters() if p.grad is not None}

    together, apart = (
        gradients([maker.pack_samples(samples)]),
        gradients([maker.pack_samples([sample]) for sample in samples]),
    )
    model.network.zero_grad()
    assert together.keys() == apart.keys()
    for name, gradient in together.items():
        assert torch.allclose(gradient, apart[name], rtol=1e-4, atol=1e-5), name


def test_a_blank_image_changes_nothing_and_gives_the_tower_gradients(model, squares):
    row = {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "a cat"}]}
    sample = reader_of(model).read(parse_conversation(row, "text"))
    plain, blank = maker_of(model).pack_samples([sample]), maker_of(model, ("image", "video")).pack_samples([sample])
    with torch.no_grad():
        assert torch.allclose(model.predict(plain).losses, model.predict(blank).losses, atol=1e-6)
    model.predict(blank).losses.sum().backward()
    gradients = {name: p.grad for name, p in model.network.named_parameters() if name.startswith("model.visual.")}
    model.network.zero_grad()
    assert all(gradient is not None and not gradient.any() for gradient in gradients.values())


def test_an_empty_row_runs_a_forward_without_loss(model):
    row = maker_of(model, ("image",)).pack_samples([])
    found = model.predict(row)
    assert (len(found.losses), row.num_samples) == (0, 0)
    (found.losses * row.weights).sum().backward()
    model.network.zero_grad()


def test_the_loss_can_weight_conversations_equally(model, squares):
    samples = samples_of(model, squares)
    row = maker_of(model, by_sample=True).pack_samples(samples)
    counts = [sum(label != IGNORE_INDEX for label in sample.tokens.labels) for sample in samples]
    assert row.num_samples == 3
    assert len(set(counts)) > 1
    sums = [float(part.sum()) for part in row.weights.split(counts)]
    assert sums == pytest.approx([1.0, 1.0, 1.0])


def test_losses_by_chunks_are_those_of_all_logits_at_once(monkeypatch):
    monkeypatch.setattr(language_model, "LOSS_CHUNK", 3)
    logits = torch.randn(8, 11, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    whole = logits.detach().clone().requires_grad_()
    targets = torch.arange(8)
    found = language_model.score_logits(logits, targets)
    losses = torch.nn.functional.cross_entropy(whole.float(), targets, reduction="none")
    assert torch.equal(found.losses, losses)
    found.losses.sum().backward()
    losses.sum().backward()
    assert torch.equal(logits.grad, whole.grad)


def test_an_image_equals_the_output_of_the_image_processor(model, squares):
    from PIL import Image

    sample = samples_of(model, squares)[1]
    size = {"shortest_edge": 1, "longest_edge": 56 * 56}
    with Image.open(squares / "images" / "001.png") as picture:
        found = model.image_processor(images=[picture], size=size, return_tensors="np")
    ((_, pixels),) = sample.pixels
    assert np.array_equal(pixels.patches, found["pixel_values"])
    assert list(pixels.grid) == found["image_grid_thw"][0].tolist()
    tokens = sum(token == model.pad_ids["image"] for token in sample.tokens.ids)
    assert tokens == np.prod(pixels.grid) // model.image_processor.merge_size**2


def test_a_video_is_pairs_of_its_frames(model, squares):
    media = MediaReader(model.image_processor, DataRecipe.model_validate({**DATA, "video": {"fps": 8}}))
    medium = MediaReference("video", str(squares / "clip.mp4"))
    sized, found = media.measure(medium), media.read(medium)
    assert np.prod(found.grid) == sized.num_times * sized.num_tokens * media.merge**2
    assert list(sized.seconds) == sorted(sized.seconds)
    # The patch channels contain two times: they differ for a video and are equal for an image.
    patches = found.patches.reshape(found.grid[0], -1, 3, media.times, media.patch**2)
    assert not np.array_equal(patches[:, :, :, 0], patches[:, :, :, 1])


def test_too_long_conversations(model, squares):
    row = {
        "image": "images/000.png",
        "conversations": [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "red " * 60}],
    }
    conversation = parse_conversation(row, "long", root=str(squares))
    with pytest.raises(BadConversation, match="the limit is 64") as error:
        reader_of(model, max_tokens=64).read(conversation)
    assert error.value.reason == "too_long"
    cut = reader_of(model, max_tokens=64, too_long="truncate_answer").read(conversation)
    assert len(cut.tokens) == 64
    assert cut.tokens.labels[-1] == cut.tokens.ids[-1]
    question = {**row, "conversations": [{"from": "human", "value": "red " * 80}, {"from": "gpt", "value": "red"}]}
    with pytest.raises(BadConversation):  # the row would lose the whole answer or a part of the image
        reader_of(model, max_tokens=64, too_long="truncate_answer").read(
            parse_conversation(question, "q", root=str(squares))
        )


def test_media_that_cannot_be_read(model, squares, tmp_path):
    (tmp_path / "broken.png").write_bytes((squares / "images" / "000.png").read_bytes()[:60])
    (tmp_path / "empty.mp4").write_bytes(b"")
    for medium in ({"image": "missing.png"}, {"image": "broken.png"}, {"video": "empty.mp4"}):
        row = {"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "!"}], **medium}
        with pytest.raises(BadConversation) as error:
            reader_of(model).read(parse_conversation(row, "r", root=str(tmp_path)))
        assert error.value.reason == "media"


def test_lora_adapts_only_the_language_model(model):
    targets = model.default_lora_targets
    assert len(targets) == 2 * 7  # layers
    assert all("language_model" in name for name in targets)
    parts = {part: model.group_parameter_names([part]) for part in ("vision", "merger", "language")}
    names = {name for name, _ in model.network.named_parameters()}
    assert frozenset().union(*parts.values()) == names
    assert sum(map(len, parts.values())) == len(names)
    assert all(parts.values())


def test_folders_without_a_supported_model(tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        language_model.load_language_model(str(tmp_path), torch.float32)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    with pytest.raises(ModelError, match="has no vision tower"):
        language_model.load_language_model(str(tmp_path), torch.float32)


def test_weights_in_float8_or_with_scales_are_refused(tmp_path):
    write_tiny_model("qwen25vl", tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    name = next(name for name, tensor in weights.items() if name.endswith("q_proj.weight"))
    for changed, message in (
        (weights | {name: weights[name].to(torch.float8_e4m3fn)}, "weights are stored as F8_E4M3; use the original"),
        (weights | {name.replace(".weight", ".scale_weight"): torch.ones(1)}, r"scale_weight: .*use the original"),
    ):
        save_file(changed, file, metadata={"format": "pt"})
        with pytest.raises(ModelError, match=message):
            language_model.load_language_model(str(tmp_path), torch.float32)
