"""Validation samples start with the frames of the recording that they are compared with."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from clips import index_of, write_clip
from families import load_tiny
from lerobot import FRONT, record, write_lerobot
from wfm_ds.cli import evaluate
from wfm_ds.cli.evaluation_models import EvaluatedModel
from wfm_ds.cli.evaluation_samples import EvaluationData
from wfm_ds.cli.evaluation_settings import select_functions
from wfm_ds.data.datasets import load_data
from wfm_ds.errors import RecipeError, UserError
from wfm_ds.models.assets.text_cache import TextCache
from wfm_ds.models.sampler import CountingForward, Sampler
from wfm_ds.recipe.file import load_recipe
from wfm_ds.training.clip_scoring import ClipScoring, GeneratedClip
from wfm_ds.training.reward_checks import check_rewards, check_service_references
from wfm_ds.training.validation_frames import load_validation_samples

RECIPES = Path(__file__).parent.parent / "recipes"
SIZE = ["sampling.height=32", "sampling.width=32", "sampling.num_frames=9"]
COUNTS = ["algorithm.min_num_conditional_frames=0", "algorithm.max_num_conditional_frames=2"]
NUM_FRAMES, START = 40, 16  # of the files; first frame of the centred clip of 9 frames
HELD_OUT = "validation.held_out_rewards=[{name: continuation}]"


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """Three videos of 40 frames whose grey level is the frame number."""
    folder = tmp_path_factory.mktemp("videos")
    for k in range(3):
        write_clip(folder / f"{k}.mp4", NUM_FRAMES, size=(32, 32))
        (folder / f"{k}.json").write_text(json.dumps({"prompt": f"a grey wall {k}"}))
    return folder


@pytest.fixture(scope="module")
def model(tiny_pipelines):
    return load_tiny(tiny_pipelines("cosmos25"), "cosmos25")


def load_nft(data, *overrides):
    return load_recipe(RECIPES / "cosmos25_i2v_nft.yaml", [f"data.path={data}", *SIZE, *overrides])


def load_samples(recipe, model, monkeypatch):
    """Return {caller: (numbers of the encoded frames, numbers of conditioning frames, recordings)}."""
    sampler = Sampler(
        model=model, text_cache=TextCache(model), settings=recipe.sampling, forward=CountingForward(model.denoise)
    )
    world = SimpleNamespace(
        is_leader=True,
        sp_size=1,
        device=model.device,
        run_checked=lambda function, on: function(),
        broadcast_in_replica=lambda value: value,
        broadcast_tensor_in_replica=lambda tensor: tensor,
    )
    job = SimpleNamespace(recipe=recipe, world=world, model=model, sampler=sampler, latent_cache=None)
    encoded, stock = [], type(model).encode_uint8

    def encode_uint8(pixels):
        encoded.append(index_of(pixels[0].reshape(-1, 32, 32, 3)[0]))
        return stock(model, pixels)

    monkeypatch.setattr(model, "encode_uint8", encode_uint8)
    result, data = {}, load_data(recipe)
    for caller in ("nothing", "training", "evaluation"):
        if caller == "evaluation":
            samples = EvaluationData(recipe, data).choose_samples(sampler)
        else:
            samples = load_validation_samples(job, data, needs_recordings=caller == "training")
        encoded.clear()
        counts = samples.frames.load_frames(samples.prompts).counts.tolist()
        result[caller] = list(encoded), counts, samples
    return result


def test_samples_start_with_the_first_frame_of_their_recording(videos, model, monkeypatch):
    """Otherwise a run reads only the conditioning frames, which are in the middle of the file."""
    found = load_samples(load_nft(videos), model, monkeypatch)
    assert found["nothing"][0] == [NUM_FRAMES // 2] * 3
    assert found["nothing"][2].recordings is None
    for caller in ("training", "evaluation"):
        encoded, _, samples = found[caller]
        assert encoded == [START] * 3
        for prompt in samples.prompts:
            recorded = samples.recordings.load(prompt.id)
            assert [index_of(frame) for frame in recorded] == list(range(START, START + 9))


def test_samples_that_are_compared_with_a_recording_have_conditioning_frames(videos, model, monkeypatch):
    found = load_samples(load_nft(videos, *COUNTS), model, monkeypatch)
    assert {caller: counts for caller, (_, counts, _) in found.items()} == {
        "nothing": [2, 1, 0],
        "training": [2, 1, 2],
        "evaluation": [2, 1, 2],
    }


def test_the_options_of_an_evaluation_apply_to_the_windows_of_episodes(tmp_path):
    root = write_lerobot(tmp_path / "set", "v3.0", record(tmp_path / "files", [40, 40]))
    data = ["data.kind=lerobot", f"data.views=[[{FRONT}]]", "data.prompt=work"]
    recipe = load_nft(root, *data)
    for frames, clips, length in ((9, 1, 9), (9, 2, 18), (17, 2, 34)):
        args = SimpleNamespace(height=32, width=32, frames=frames, fps=16, clips=clips)
        loaded = EvaluationData.load(recipe, args).data
        assert len(loaded.samples) == 2 * (40 // length)
        assert all(sample.media.length >= length for sample in loaded.samples)


def test_rewards_that_compare_are_refused_without_recordings(videos, tmp_path, tiny_pipelines):
    (tmp_path / "prompts.txt").write_text("a wall\n")
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    (tmp_path / "a.json").write_text('{"prompt": "a wall"}')
    recipe = load_nft(videos, HELD_OUT)
    check_rewards(recipe, load_data(recipe))
    texts = load_nft(videos, HELD_OUT, *COUNTS, f"validation.prompts={tmp_path / 'prompts.txt'}")
    images = load_nft(tmp_path, HELD_OUT)
    for refused in (texts, images):
        with pytest.raises(RecipeError, match="reward continuation compares samples with the recordings"):
            check_rewards(refused, load_data(refused))

    args = evaluate.parser().parse_args(["m", "--prompts", "p.txt"])
    trained = load_nft(videos, "reward.functions=[{name: continuation}]")
    run = EvaluatedModel(argument="m", name="m", model=str(tiny_pipelines("cosmos25")), recipe=trained)
    assert list(select_functions(args, [run], [], EvaluationData(trained, load_data(trained)))) == ["continuation"]
    with pytest.raises(RecipeError, match=r"in wfm evaluate by --data"):
        select_functions(args, [run], [])
    supervised = images.model_copy(update={"reward": None})
    with pytest.raises(UserError, match="--rewards is required"):
        select_functions(args, [replace(run, recipe=None)], [], EvaluationData(supervised, load_data(images)))


def test_rewards_of_a_running_service_are_refused_without_recordings(videos):
    """A class of the user is known only to the service."""
    service = ["reward.spawn=false", "reward.endpoint=ipc://none"]
    held_out = load_nft(videos, "validation.held_out_rewards=[{name: 'mine:Close'}]", *service)
    trained = load_nft(videos, "reward.functions=[{name: 'mine:Close'}]", *service)
    both = load_nft(videos, "reward.functions=[{name: 'mine:Close'}, {name: continuation}]", *service)
    for recipe in (held_out, both):
        check_service_references(recipe, ["mine:Close"], has_recordings=True)
    with pytest.raises(RecipeError, match="reward mine:Close compares samples with the recordings"):
        check_service_references(held_out, ["mine:Close"], has_recordings=False)
    with pytest.raises(RecipeError, match=r"reward mine:Close of the service .* rollouts keep only for built-in"):
        check_service_references(trained, ["mine:Close"], has_recordings=True)


def test_rewards_fail_with_the_reason_why_the_recording_cannot_be_read(videos, model, monkeypatch, tmp_path):
    recipe = load_nft(videos)
    samples = load_samples(recipe, model, monkeypatch)["evaluation"][2]
    (lost, *_), media = samples.prompts, samples.recordings.media
    media[lost.id] = type(media[lost.id])(tmp_path / "lost.mp4")
    recorded = samples.recordings.load(lost.id)
    assert "lost.mp4" in recorded
    shown, sent = samples.recordings.load(samples.prompts[1].id), []
    client = SimpleNamespace(
        names=["continuation"], reference_rewards=["continuation"], submit=lambda *parts: sent.append(parts)
    )
    sampler = SimpleNamespace(
        model=model, settings=recipe.sampling, decode_to_uint8=lambda latents: (shown[None], None)
    )
    scoring = ClipScoring(sampler=sampler, layout=samples.layout, scorers=[client], recordings=samples.recordings)
    clips = [
        GeneratedClip(sample_id=name, clip=0, prompt=lost, pixels=shown, is_finite=True, recorded=part)
        for name, part in (("a", recorded), ("b", shown))
    ]
    scores = scoring.submit(clips)
    ((batch, failures),) = sent
    assert failures == {"a": recorded}
    assert [reference is None for reference in batch.references] == [True, False]
    assert {score.failure for score in scores["a"].values()} == {recorded}
    assert scores["b"]["recording/psnr"].value == 60.0
