"""One rank reads a dataset and broadcasts it: all ranks get the same samples and errors. Each file is read one time."""

import dataclasses
import json
import os

import pytest

from wfm_ds.data.broadcast import pack_data, unpack_data
from wfm_ds.data.datasets import TrainingData
from wfm_ds.data.samples import LocalFile, Sample
from wfm_ds.data.webdataset import IndexEntry, TarMember
from wfm_ds.types import Prompt


def read_paired(folder, own_kind):
    """Return the samples of a captioned folder on this rank, and the number of captions that this rank read."""
    from pathlib import Path

    from wfm_ds.data import captioned_folder
    from wfm_ds.data.broadcast import read_on_main
    from wfm_ds.distributed.world import World
    from wfm_ds.errors import UserError

    read, names = captioned_folder.read_regular, []
    captioned_folder.read_regular = lambda path: [names.append(path), read(path)][1]

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

    try:
        data = read_on_main(World.join(), scan_own if own_kind else scan)
    except UserError as error:
        return {"error": str(error), "reads": len(names)}
    finally:
        captioned_folder.read_regular = read
    return {
        "samples": [[s.id, s.media.name, s.prompt.text] for s in data.samples],
        "same": all(prompt is s.prompt for prompt, s in zip(data.prompts, data.samples, strict=True)),
        "bad": {reason: list(names) for reason, names in data.bad.items()},
        "reads": len(names),
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
    samples = [
        Sample(id="a", media=LocalFile(os.fsdecode(b"/\xe9.png")), prompt=prompt),
        Sample(id="a", media=member, prompt=prompt),
    ]
    data = TrainingData(
        prompts=[prompt], samples=samples, held_out=samples[:1], validation_prompts=[prompt], bad={"shard": ["x"]}
    )
    assert unpack_data(json.loads(json.dumps(pack_data(data)))) == data
