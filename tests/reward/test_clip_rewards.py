"""CLIP-based rewards with tiny random models and real processors, compared with the formulas of the rewards."""

import itertools

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor

from each_case import check_each
from reward_samples import loaded, media_batch
from wfm_ds.errors import RewardError
from wfm_ds.models.tiny.tokenizers import clip_tokenizer
from wfm_reward.rewards.aesthetic import LINEAR_LAYERS
from wfm_reward.rewards.hpsv2 import convert_to_transformers, letterbox_images

SIZE, WIDTH, CONTEXT = 16, 24, 12
PROMPTS = ["a red circle", "the blue square on white", "a " * 40]


def save_clip(folder, seed=0):
    tokenizer = clip_tokenizer(CONTEXT)
    text = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": CONTEXT, "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id, "hidden_act": "gelu",
    }  # fmt: skip
    vision = {
        "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
        "image_size": SIZE, "patch_size": 4, "hidden_act": "gelu",
    }  # fmt: skip
    torch.manual_seed(seed)
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=WIDTH)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    size = {"shortest_edge": SIZE}
    images = CLIPImageProcessor(size=size, crop_size={"height": SIZE, "width": SIZE})
    CLIPProcessor(image_processor=images, tokenizer=tokenizer).save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    return save_clip(folder), str(folder)


def a_batch(size=(20, 28)):
    return media_batch(np.random.default_rng(0).integers(0, 256, (len(PROMPTS), *size, 3), dtype=np.uint8), PROMPTS)


def values(reward, batch):
    scores = reward.score(batch)
    assert [s.sample_id for s in scores] == batch.sample_ids
    return [s.value for s in scores]


def embeddings(model, folder, batch):
    """Return image embeddings and logits from the library's own forward pass."""
    processor = CLIPProcessor.from_pretrained(folder)
    inputs = processor(
        text=PROMPTS, images=[Image.fromarray(m) for m in batch.media], padding=True, truncation=True,
        max_length=CONTEXT, return_tensors="pt",
    )  # fmt: skip
    with torch.no_grad():
        outputs = model(**inputs)
    return outputs.image_embeds, outputs.logits_per_image.diagonal()


@pytest.mark.parametrize(("name", "scale"), [("pickscore", 1 / 26), ("clipscore", None)])
def test_the_score_is_the_models_logit(clip, name, scale):
    model, folder = clip
    more = {"processor": folder} if name == "pickscore" else {}
    reward = loaded(name, model=folder, **more)
    batch = a_batch()
    _, logits = embeddings(model, folder, batch)
    want = logits * scale if scale else logits / model.logit_scale.exp().detach()
    got = values(reward, batch)
    assert got == pytest.approx(want.tolist(), abs=1e-5)
    assert len(set(np.round(got, 4))) == 3
    limits = reward.outputs[reward.primary_output]
    assert all(value in limits for value in got)


def test_aesthetic_is_the_published_head_on_the_image_embedding(clip, tmp_path):
    model, folder = clip
    torch.manual_seed(1)
    sizes = [WIDTH, 10, 8, 6, 4, 1]
    head = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))
    pairs = zip(LINEAR_LAYERS, head, strict=True)
    weights = {f"layers.{i}.{part}": getattr(layer, part).data for i, layer in pairs for part in ("weight", "bias")}
    torch.save(weights, tmp_path / "head.pth")
    reward = loaded("aesthetic", model=folder, head=str(tmp_path / "head.pth"))
    batch = a_batch()
    image_embeds, _ = embeddings(model, folder, batch)
    assert values(reward, batch) == pytest.approx(head(image_embeds)[:, 0].tolist(), abs=1e-5)
    torch.save(
        {name: w[:, :9] if name == "layers.0.weight" else w for name, w in weights.items()}, tmp_path / "bad.pth"
    )
    with pytest.raises(RewardError, match="not a head for embeddings of size 24"):
        loaded("aesthetic", model=folder, head=str(tmp_path / "bad.pth"))
    torch.save({"layers.0.weight": weights["layers.0.weight"]}, tmp_path / "bad.pth")
    with pytest.raises(RewardError, match="is not the published head"):
        loaded("aesthetic", model=folder, head=str(tmp_path / "bad.pth"))


# HPS v2: open_clip's layers, reimplemented


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, hidden), "c_proj": nn.Linear(hidden, width)})

    def forward(self, x, mask):
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False, attn_mask=mask)[0]
        return x + self.mlp["c_proj"](nn.functional.gelu(self.mlp["c_fc"](self.ln_2(x))))


class Tower(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.resblocks = nn.ModuleList(Block(width, hidden) for _ in range(2))

    def forward(self, x, mask=None):
        for block in self.resblocks:
            x = block(x, mask)
        return x


class Visual(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 4, 4, bias=False)
        self.class_embedding = nn.Parameter(torch.randn(width))
        self.positional_embedding = nn.Parameter(torch.randn(17, width))
        self.ln_pre, self.ln_post = nn.LayerNorm(width), nn.LayerNorm(width)
        self.transformer = Tower(width, 56)
        self.proj = nn.Parameter(torch.randn(width, WIDTH))

    def forward(self, pixels):
        x = self.conv1(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_embedding.expand(len(x), 1, -1), x], dim=1) + self.positional_embedding
        return self.ln_post(self.transformer(self.ln_pre(x))[:, 0]) @ self.proj


class OpenClip(nn.Module):
    def __init__(self, words, width=32):
        super().__init__()
        self.visual = Visual()
        self.token_embedding = nn.Embedding(words, width)
        self.positional_embedding = nn.Parameter(torch.randn(CONTEXT, width))
        self.transformer = Tower(width, 48)
        self.ln_final = nn.LayerNorm(width)
        self.text_projection = nn.Parameter(torch.randn(width, WIDTH))
        self.logit_scale = nn.Parameter(torch.tensor(3.0))

    def encode_text(self, tokens, ends):
        mask = torch.full((tokens.shape[1],) * 2, float("-inf")).triu(1)
        x = self.token_embedding(tokens) + self.positional_embedding[: tokens.shape[1]]
        x = self.ln_final(self.transformer(x, mask))
        return x[torch.arange(len(x)), ends] @ self.text_projection


def test_hpsv2_is_the_cosine_of_open_clips_model(clip, tmp_path):
    _, folder = clip
    processor = CLIPProcessor.from_pretrained(folder)
    torch.manual_seed(2)
    published = OpenClip(len(processor.tokenizer)).eval()
    torch.save({"state_dict": published.state_dict()}, tmp_path / "HPS.pt")
    reward = loaded("hpsv2", model=str(tmp_path / "HPS.pt"), base=folder)
    batch = a_batch()
    tokens = processor(text=PROMPTS, padding=True, truncation=True, max_length=CONTEXT, return_tensors="pt")[
        "input_ids"
    ]
    ends = (tokens == processor.tokenizer.eos_token_id).int().argmax(dim=1)
    pixels = processor(images=letterbox_images(batch.media, SIZE), return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        want = nn.functional.cosine_similarity(published.visual(pixels), published.encode_text(tokens, ends))
    assert values(reward, batch) == pytest.approx(want.tolist(), abs=2e-5)


def test_weights_of_another_model_are_named(clip, tmp_path):
    _, folder = clip
    with pytest.raises(KeyError, match=r"visual\.ln_mid\.weight is not a weight of open_clip's CLIP"):
        convert_to_transformers({"visual.ln_mid.weight": torch.zeros(1)})
    torch.save({"state_dict": {"logit_scale": torch.zeros(())}}, tmp_path / "HPS.pt")
    with pytest.raises(RewardError, match=r"reward hpsv2: the model .*HPS\.pt cannot be loaded: .*Missing key"):
        loaded("hpsv2", model=str(tmp_path / "HPS.pt"), base=folder)


def test_letterboxing_keeps_the_whole_image():
    wide = np.full((1, 20, 40, 3), 200, np.uint8)
    (boxed,) = letterbox_images(wide, 16)
    pixels = np.asarray(boxed)
    assert pixels.shape == (16, 16, 3)
    assert (pixels[4:12] == 200).all()
    assert not pixels[:4].any()
    assert not pixels[12:].any()


@check_each("name", ["pickscore", "clipscore", "aesthetic", "hpsv2"])
def test_missing_weights_are_named_with_the_fix(name, tmp_path):
    with pytest.raises(RewardError, match=rf"reward {name}: the .* cannot be loaded: .* Set the option to a local"):
        loaded(name, model=str(tmp_path / "nowhere"))


def test_another_dtype_is_refused(clip):
    with pytest.raises(RewardError, match="dtype is 'int8'; it must be float32, bfloat16 or float16"):
        loaded("clipscore", model=clip[1], dtype="int8")
    half = loaded("clipscore", model=clip[1], dtype="bfloat16")
    full = loaded("clipscore", model=clip[1])
    assert values(half, a_batch()) == pytest.approx(values(full, a_batch()), abs=0.03)
