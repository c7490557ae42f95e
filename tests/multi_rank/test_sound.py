"""SFT and DPO of video with sound: one rank, two ranks, resumed runs and cached latents."""

import json

import pytest

from multi_rank.resuming import assert_equal_runs, records
from multi_rank.same_runs import assert_same_runs
from wfm_ds.demos.room_data import write_room

COMMON = [
    *(
        "sampling.height=32",
        "sampling.width=64",
        "sampling.num_frames=5",
        "sampling.fps=8",
        "sampling.guidance_scale=1",
    ),
    *("data.fps=8", "data.clip=centre", "data.max_upscale=8", "optimizer.lr=3e-2", "optimizer.eps=1e-4"),
    *("run.steps=2", "logging.console=false", "validation.every=2", "validation.num_prompts=1", "engine.guard=true"),
]
CASES = {
    "sft": ("sd3_sft", ["data.kind=paired", "data.caption_dropout=0.3", "validation.num_images=2"]),
    "dpo": ("sd3_dpo", ["data.kind=pairs", "validation.num_images=2"]),
}


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound") / "room"
    write_room(folder)
    captions = sorted((folder / "clips").glob("*.json"))
    pairs = [
        {"prompt": f"a room {i}", "chosen": f"{one.stem}.mkv", "rejected": f"{other.stem}.mkv"}
        for i, (one, other) in enumerate(zip(captions[:8], captions[8:16], strict=True))
    ]
    (folder / "clips" / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return folder / "clips"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.ci_cases("sft")
def test_runs_are_the_same_on_one_rank_on_two_resumed_and_from_cached_latents(case, train_tiny, room, tmp_path):
    name, of_case = CASES[case]
    data = room / "pairs.jsonl" if case == "dpo" else room

    def train(where, *overrides, **options):
        train_tiny(where, name, *COMMON, *of_case, *overrides, family="ltx2", data=data, **options)

    cached = ["data.cache_latents=true", f"data.cache_dir={tmp_path / 'cache'}"]
    for folder, ranks, batches, more in (
        ("one", 1, 2, []),
        ("two", 2, 1, []),
        ("cached", 1, 2, cached),
        ("again", 1, 2, cached),
        ("video", 1, 2, ["algorithm.stream_weights={audio: 0}"]),
    ):
        train(folder, f"engine.gradient_accumulation={batches}", *more, ranks=ranks)
    for stop in (1, None):
        train("resumed", "engine.gradient_accumulation=2", stop_at=stop)
    assert_equal_runs(tmp_path / "resumed", tmp_path / "one", step=2)
    assert_equal_runs(tmp_path / "again", tmp_path / "cached", step=2)
    assert_same_runs(tmp_path / "one", tmp_path / "two")
    assert_same_runs(tmp_path / "one", tmp_path / "cached")
    losses = {
        folder: [line["val/loss"] for line in records(tmp_path / folder) if "val/loss" in line]
        for folder in ("one", "video")
    }
    assert len(losses["one"]) > 1
    assert losses["one"][-1] != losses["video"][-1]  # DPO's loss before training does not depend on the weights
