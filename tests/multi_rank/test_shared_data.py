"""One rank reads a dataset and broadcasts it: all ranks get the same samples and errors. Each file is read one time."""

import dataclasses
import json
import os
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from wfm_ds.data.action_data import ActionData
from wfm_ds.data.broadcast import pack_data, unpack_data
from wfm_ds.data.datasets import TrainingData
from wfm_ds.data.episode import CameraSpan, EpisodeVideo
from wfm_ds.data.episode_rows import EpisodeRows
from wfm_ds.data.hf_dataset import HfColumn, HfMedia
from wfm_ds.data.samples import LocalFile, RemoteFile, Sample
from wfm_ds.data.trajectories import ActionScaling
from wfm_ds.data.webdataset import IndexEntry, TarMember
from wfm_ds.types import Prompt


def read_paired(folder, own_kind):
    """Return the samples of a captioned folder on this rank, and the number of captions that this rank read."""
    from wfm_ds.data import captioned_folder
    from wfm_ds.data.broadcast import read_on_main
    from wfm_ds.distributed.world import World
    from wfm_ds.errors import UserError

    def scan():
        found = captioned_folder.CaptionedFolder(Path(folder), max_bad_fraction=0.5)
        return TrainingData(
            prompts=[s.prompt for s in found.samples],
            samples=found.samples,
            held_out=[],
            validation_prompts=[],
            bad=found.bad,
        )

    class OwnMedia:
        def __init__(self, media):
            self.name = media.name

    def scan_own():
        data = scan()
        samples = [dataclasses.replace(sample, media=OwnMedia(sample.media)) for sample in data.samples]
        return dataclasses.replace(data, samples=samples)

    read = captioned_folder.read_regular
    with mock.patch.object(captioned_folder, "read_regular", side_effect=read) as reads:
        try:
            data = read_on_main(World.join(), scan_own if own_kind else scan)
        except UserError as error:
            return {"error": str(error), "reads": reads.call_count}
    return {
        "samples": [[s.id, s.media.name, s.prompt.text] for s in data.samples],
        "same": all(prompt is s.prompt for prompt, s in zip(data.prompts, data.samples, strict=True)),
        "bad": {reason: list(names) for reason, names in data.bad.items()},
        "reads": reads.call_count,
    }


@pytest.mark.parametrize("own_kind", [False, True])
def test_one_rank_reads_and_broadcasts_for_all(two_ranks, tmp_path, own_kind):
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"prompt": f"a {name}"}))
        (tmp_path / f"{name}.png").touch()
    (tmp_path / f"{os.fsdecode(bytes([233]))}.png").touch()
    first, second = two_ranks.run(read_paired, folder=str(tmp_path), own_kind=own_kind)
    assert (first.pop("reads"), second.pop("reads")) == (3, 3 if own_kind else 0)
    assert first == second
    assert first["samples"] == [[name, f"{tmp_path}/{name}.png", f"a {name}"] for name in ("a", "b", "c")]
    assert first["same"]


def test_all_ranks_get_the_error_of_the_reading_rank(two_ranks, tmp_path):
    found = two_ranks.run(read_paired, folder=str(tmp_path / "nowhere"), own_kind=False)
    assert [rank["error"].startswith(f"{tmp_path}/nowhere is not a folder") for rank in found] == [True, True]


def test_every_kind_of_media_is_received_unchanged():
    prompt = Prompt(id="a", text="a", negative_text="b", metadata={"c": [1]})
    member = TarMember("s3://x/1.tar", ("s3://x/1.tar", 3, "tag"), IndexEntry("a", "png", 512, 9, None))
    local, row = LocalFile(os.fsdecode(b"/\xe9.png")), HfMedia(HfColumn(("a.arrow", "b.arrow"), "image"), 3, ".png")
    mask = dataclasses.replace(row, column=HfColumn(("a.arrow", "b.arrow"), "mask"))
    media = {"media": local, "rejected": row, "files": {"a.npy": member}, "images": {"source": member, "mask": mask}}
    samples = [Sample(id="a", prompt=prompt, texts=("a", "b"), embedding=Path("/a.safetensors"), **media)]
    for i in range(2):
        video = EpisodeVideo("b", ((CameraSpan(f"s3://x/{i}.mp4", 0.5),),), 16.0, i, 1)
        samples.append(Sample(id=f"b#{i}", media=video, rows=EpisodeRows("b", 2 * i, 2, i), prompt=prompt))
    scaling = ActionScaling(np.array([0.1, 1 / 3]), np.array([1.0, 7.0]), 1.0)
    actions = ActionData(width=2, scaling=scaling, library=np.float32([[[1, 2]]]), sets={"a": ActionData(width=3)})
    data = TrainingData(
        prompts=[prompt], samples=samples, held_out=samples[:1], validation_prompts=[prompt], bad={"shard": ["x"]}
    )
    assert unpack_data(json.loads(json.dumps(pack_data(data)))) == data
    with_actions = dataclasses.replace(data, actions=actions)
    received = unpack_data(json.loads(json.dumps(pack_data(with_actions)))).actions
    assert (received.library == actions.library).all()
    assert (received.scaling(actions.library) == scaling(actions.library)).all()
    assert received.sets == actions.sets
    for changes in ({"media": RemoteFile("s3://x/a.png")}, {"rows": {}}, {"images": {"source": RemoteFile("a")}}):
        own = dataclasses.replace(samples[0], **changes)  # of classes that only the reading rank knows
        assert pack_data(dataclasses.replace(data, held_out=[own])) is None
