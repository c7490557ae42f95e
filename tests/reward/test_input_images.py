"""Input images reach rewards unchanged, next to images and videos, with and without recordings and sound."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from reward_http import started_client
from reward_samples import checksum
from wfm_ds.errors import RewardError
from wfm_ds.recipe.sections import RewardRecipe
from wfm_ds.rollout.rewards import RewardClient, submit_finite_samples
from wfm_ds.transport.arrays import append_sound, pack_arrays, unpack_arrays
from wfm_ds.transport.broker import Broker, TaskKind
from wfm_ds.transport.client import PipeClient
from wfm_ds.transport.socket_folders import SocketFolder
from wfm_ds.types import MediaBatch, Prompt
from wfm_reward.worker import _read_rows

H, W = 6, 5
PROBE, OTHER = "probe_rewards:InputImages", "probe_rewards:Brightness"


def draw_images(seed, *shape):
    return np.random.default_rng(seed).integers(0, 256, (*shape, 3)).astype(np.uint8)


def score_samples(folder, images, prompts, fps, references=()):
    with started_client(folder, {"name": PROBE}) as client:
        assert client.image_rewards == [PROBE]
        client.reference_rewards = [PROBE] if references else []
        ids = [f"s{i}" for i in range(len(prompts))]
        submit_finite_samples(client, images, [True] * len(ids), ids, prompts, fps, references)
        scores = client.wait()
    return [scores[i][PROBE] for i in ids]


@pytest.mark.parametrize("kind", ["image", "video", "recording"])
@pytest.mark.slow
def test_images_reach_the_reward_unchanged_and_in_the_size_of_the_sample(kind, tmp_path):
    shape = (3, H, W) if kind == "image" else (3, 4, H, W)
    samples, references = draw_images(1, *shape), list(draw_images(2, 3, 2, H, W)) if kind == "recording" else ()
    large = draw_images(3, 2 * H, 2 * W)
    inputs = [
        {"source": draw_images(4, H, W), "mask": draw_images(5, H, W)},
        {},
        {"source": large, "actions": np.ones((3, 2), np.float32)},
    ]
    prompts = [Prompt(id=str(i), text="", inputs=row) for i, row in enumerate(inputs)]
    scores = score_samples(tmp_path, samples, prompts, None if kind == "image" else 8.0, references)
    resized = np.asarray(Image.fromarray(large).resize((W, H), Image.Resampling.BICUBIC))
    expected = [
        {"source": checksum(inputs[0]["source"]), "mask": checksum(inputs[0]["mask"])},
        {},
        {"source": checksum(resized)},
    ]
    for i, score in enumerate(scores):
        own = {"frames": checksum(samples[i] if samples.ndim == 5 else samples[i][None])}
        recorded = {"reference": checksum(references[i])} if references else {}
        assert score.failure is None
        assert score.parts == {**own, **recorded, **expected[i]}


def test_images_are_sent_only_if_a_reward_sees_them(tmp_path, monkeypatch):
    prompts, sent = [Prompt(id="0", text="", inputs={"source": draw_images(1, H, W)})], []
    submit_rows = PipeClient.submit_rows

    def record_rows(client, rows, media, *rest):
        sent.append((rows[0].get("images"), media[0].shape))
        return submit_rows(client, rows, media, *rest)

    monkeypatch.setattr(PipeClient, "submit_rows", record_rows)
    for functions in ([OTHER], [OTHER, PROBE]):
        with started_client(tmp_path, *({"name": name} for name in functions)) as client:
            submit_finite_samples(client, draw_images(0, 1, H, W), [True], ["s"], prompts, None)
            scores = client.wait()["s"]
        assert [score.failure for score in scores.values()] == [None] * len(functions)
    assert sent == [(None, (H, W, 3)), (["source"], (2, H, W, 3))]


def test_a_service_that_does_not_know_input_images_is_refused():
    """It would score sources and masks as frames of a video."""
    recipe = RewardRecipe(functions=[{"name": "preservation"}], start_timeout_s=30)
    with SocketFolder() as folder:
        kinds = {"score:preservation": TaskKind(60.0, {"max_batch": 8, "options": {}})}
        broker = Broker(clients=f"ipc://{folder}/clients", workers=f"ipc://{folder}/workers", kinds=kinds)
        broker.start()
        try:
            with pytest.raises(RewardError, match=r"not pass input images to preservation: restart it with [^\n]+$"):
                RewardClient(broker.client_endpoint, recipe, "run", "rank0")
        finally:
            broker.stop(0.0)


def read_row(tensor, **fields):
    row = {"id": "s", "prompt": "", "metadata": {}, "fps": 8.0, **fields}
    return _read_rows(SimpleNamespace(rows=[row], read_tensors=lambda: [tensor]))


def test_malformed_images_references_and_sounds_fail_the_task():
    video, sound = draw_images(7, 7, H, W), np.random.default_rng(0).uniform(-1, 1, (2, 40)).astype(np.float32)
    for names in ([], ["a", "a"], list("abcdefg"), ["a", 1], "a"):
        assert re.match("row 0: .*images", str(read_row(video, images=names)))
    for count in (0, -1, 4, True, 1.0, "2"):
        assert "wrong number of reference frames" in str(read_row(video, reference=count))
    tensor = append_sound(video, sound)
    for shape, rate in (([2, 4000], 8000), ([0, 40], 8000), ("2,40", 8000), ([2, 40], None), ([2, 40], 8000.0)):
        assert re.match("row 0: .*sound", str(read_row(tensor, sound=shape, sound_rate=rate)))
    ((item, frames),) = read_row(tensor, sound=[2, 40], sound_rate=8000, reference=3)
    for found, expected in ((frames, video[:4]), (item["reference"], video[4:]), (item["sound"], sound)):
        np.testing.assert_array_equal(found, expected)
    with pytest.raises(ValueError, match="1 inputs, 0 references, 2 images, 0 sounds do not match 1 samples"):
        MediaBatch(
            media=draw_images(0, 1, H, W), sample_ids=["a"], prompts=[""], metadata=[{}], inputs=[{}], images=[{}, {}]
        )


def test_packed_arrays_keep_their_dtype_and_reject_wrong_sizes():
    arrays = {"source": draw_images(6, H, W), "actions": np.float32([[1, 2]])}
    found = unpack_arrays(pack_arrays(arrays))
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype
    shape, content, dtype = pack_arrays(arrays)["source"]
    for wrong in ([shape, content], [shape, content, "int8"], [[H, W], content, dtype]):
        with pytest.raises(ValueError, match="source: "):
            unpack_arrays({"source": wrong})
