"""Histories of rollout groups: the clips of `wfm generate --clips`. Broken histories start at the data."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers.pipelines.sana_wm.cam_utils import action_string_to_c2w

from each_case import check_each
from families import CASES, load_tiny
from wfm_ds.data.clip_layout import ClipLayout
from wfm_ds.errors import ModelError, RecipeError
from wfm_ds.models.assets.text_cache import TextCache
from wfm_ds.models.clips import choose_clip_layout, clip_seed, generate_clips
from wfm_ds.models.conditioning_frames import pad_num_frames
from wfm_ds.models.sampler import CountingForward, Sampler
from wfm_ds.recipe.file import load_recipe
from wfm_ds.recipe.sampling import SamplingRecipe
from wfm_ds.rollout.captioned_groups import draw_history_seeds
from wfm_ds.rollout.groups import Group, RolloutSample, stack_conditioning_frames
from wfm_ds.rollout.histories import (
    HistoryLayout,
    HistoryWalker,
    check_references,
    choose_history_layout,
    history_metrics,
    history_warnings,
)
from wfm_ds.rollout.remote.async_source import gather_groups
from wfm_ds.types import FIRST_FRAME, ConditioningFrames, Prompt, Score

RECIPES = Path(__file__).parent.parent / "recipes"
SEED, NUM_CLIPS = 5, 3


def make_sampler(family, tiny_pipelines):
    model = load_tiny(tiny_pipelines(family), family, inputs=["actions"] if family == "cosmos3" else [])
    height, width, num_frames = CASES[family].size
    settings = SamplingRecipe(height=height, width=width, num_frames=num_frames, eval_steps=2)
    forward = CountingForward(model.denoise)
    return Sampler(model=model, text_cache=TextCache(model), settings=settings, forward=forward)


def make_group(sampler, total, draws, num_seeds=NUM_CLIPS - 1):
    """Return a group that starts with a random image and has the inputs of `total` frames."""
    model, size = sampler.model, sampler.settings
    image, inputs, data = draws.integers(0, 256, (size.height, size.width, 3), np.uint8), {}, None
    if model.family == "cosmos3":
        inputs = {"actions": draws.normal(size=(total - 1, 9)).astype("f4"), "domain": np.float32(1)}
    if model.family == "sana_wm":
        poses = action_string_to_c2w(f"w-{total // 2},jw-{total - 1 - total // 2}")
        inputs = {"c2w": poses, "intrinsics": np.array([40, 41, 24, 16], np.float32)}
    if model.uses_clean_frames:
        data = pad_num_frames(model.encode_uint8([image])[0], sampler.latent_shape[1])
    else:
        inputs[FIRST_FRAME] = image.astype(np.float32)
    prompt = Prompt(id="p", text="a cat", inputs=inputs)
    seeds = tuple(clip_seed(SEED, clip) for clip in range(num_seeds))
    return Group(prompt=prompt, data=data, num_conditioning_frames=int(data is not None), history_seeds=seeds)


def make_walker(sampler, layout, decode=None):
    layout = HistoryLayout({layout.num_latents: layout}, NUM_CLIPS - 1, keeps_recordings=True)
    return HistoryWalker(sampler, layout, decode or sampler.decode_to_uint8)


def generate_samples(sampler, group, seeds, plan):
    frames = stack_conditioning_frames([group] * len(seeds))
    prompts = [group.prompt] * len(seeds)
    latents = sampler.generate("rollout", prompts, seeds, plan, conditional_frames=frames).clean_latents
    return sampler.decode_to_uint8(latents)[0]


@pytest.mark.parametrize(
    "family",
    ["cosmos3", *(pytest.param(f, marks=pytest.mark.slow) for f in ("cosmos25", "sana_wm", "wan21_i2v", "wan22_ti2v"))],
)
def test_samples_after_k_clips_equal_clip_k_plus_1_of_a_long_video(family, tiny_pipelines):
    sampler = make_sampler(family, tiny_pipelines)
    layout, plan = choose_clip_layout(sampler.model, sampler.settings), sampler.evaluation_plan()
    group = make_group(sampler, layout.total_frames(NUM_CLIPS), np.random.default_rng(0))
    frames = None if group.data is None else ConditioningFrames(group.data[None], torch.tensor([1]))
    long = [
        made.pixels[0]
        for made in generate_clips(sampler, "rollout", [group.prompt], [SEED], plan, layout, NUM_CLIPS, frames)
    ]
    shorter = [make_group(sampler, layout.total_frames(NUM_CLIPS), np.random.default_rng(0), k) for k in range(3)]
    for num_clips in (None, [5, 3]):  # also with more clips than needed
        sampler.forward.reset_counts()
        started = make_walker(sampler, layout).start_samples(dict(enumerate(shorter)), plan, num_clips)
        calls = 2 * sum(num_clips or [2, 1])  # 2 denoising steps
        assert sampler.forward.counts["rollout"] in (calls, 2 * calls)  # with or without guidance
        for k, start in started.items():
            assert start.clip == k
            assert start.data is None or not start.data.requires_grad
            np.testing.assert_array_equal(generate_samples(sampler, start, [clip_seed(SEED, k)], plan)[0], long[k])
            assert (generate_samples(sampler, start, [77], plan)[0] != long[k]).any()
    if family == "cosmos3":  # the actions of the second clip begin one frame late, as if clips did not overlap
        late = np.delete(group.prompt.inputs["actions"], layout.num_frames - 1, axis=0)
        inputs = {**group.prompt.inputs, "actions": np.concatenate([late, late[:1]])}
        wrong = replace(group, prompt=replace(group.prompt, inputs=inputs), history_seeds=group.history_seeds[:1])
        start = make_walker(sampler, layout).start_samples({0: wrong}, plan)[0]
        assert torch.equal(start.data, started[1].data)
        assert (generate_samples(sampler, start, [clip_seed(SEED, 1)], plan)[0] != long[1]).any()


def test_a_group_with_a_broken_history_starts_at_the_data(tiny_pipelines):
    sampler = make_sampler("cosmos3", tiny_pipelines)
    layout, draws = choose_clip_layout(sampler.model, sampler.settings), np.random.default_rng(0)
    groups = {g: make_group(sampler, layout.total_frames(NUM_CLIPS), draws) for g in (4, 7)}
    recordings = {g: draws.integers(0, 256, (layout.total_frames(NUM_CLIPS), 32, 48, 3), np.uint8) for g in groups}
    calls = []

    def decode(latents):
        """The first clip of the second group is not finite. The next one is generated nevertheless."""
        calls.append(len(latents))
        if len(calls) == 2:
            latents[0, 0, 0, 0, 0] = torch.inf
        return sampler.decode_to_uint8(latents)

    walker = make_walker(sampler, layout, decode=decode)
    started = walker.start_samples(groups, sampler.evaluation_plan())
    assert calls == [1] * 4
    assert [started[g].clip for g in groups] == [2, 0]
    assert torch.equal(started[7].data, groups[7].data)
    assert not torch.equal(started[4].data, groups[4].data)
    for g, start in started.items():
        begin = layout.first_frame(start.clip)
        actions = groups[g].prompt.inputs["actions"][begin : begin + 8]
        np.testing.assert_array_equal(start.prompt.inputs["actions"], actions)
        recording = walker.layout.slice_recording(groups[g], recordings[g])
        assert len(recording) == 2  # clips 0 and 2
        reference = walker.add_reference(replace(start, recording=recording)).reference
        encoded = sampler.model.encode_uint8([recordings[g][begin : begin + 9]])
        np.testing.assert_array_equal(reference, sampler.decode_to_uint8(encoded)[0][0, 1:])
    members = [sample_of(started[g], str(g)) for g in groups for _ in range(2)]
    scores = [{"r": Score(sample_id="s", reward="r", value=v)} for v in (1.0, 2.0, 4.0)]
    scores.append({"r": Score(sample_id="s", reward="r", failure="lost")})
    expected = {"rollout/history_broken": 1.0, "reward/r/after_0": 4.0, "reward/r/after_2": 1.5}
    assert history_metrics(members, scores, ["r"]) == expected


def sample_of(group, group_id):
    return RolloutSample(sample_id="s", group_id=group_id, group=group, seed=0, noise_seed=0)


def test_history_lengths_are_equally_frequent_and_drawn_for_each_step():
    for num_groups, max_clips in ((12, 2), (8, 3), (5, 0), (2, 4)):
        steps = [draw_history_seeds(3, step, num_groups, max_clips) for step in range(1, 40)]
        for seeds in steps:
            counts = Counter(map(len, seeds))
            assert set(counts) <= set(range(max_clips + 1))
            assert max_clips >= num_groups or set(counts.values()) == {num_groups // (max_clips + 1)}
        by_group = [Counter(len(seeds[g]) for seeds in steps) for g in range(num_groups)]
        assert all(set(counts) == set(range(max_clips + 1)) for counts in by_group)
        drawn = [seed for seeds in steps for clips in seeds for seed in clips]
        assert len(set(drawn)) == len(drawn)
        assert max_clips == 0 or len({tuple(map(len, seeds)) for seeds in steps}) > 1
        assert draw_history_seeds(3, 7, num_groups, max_clips) == steps[6]


def test_history_lengths_are_equally_frequent_if_they_do_not_divide_the_groups():
    """The standard deviation of a frequency is at most 0.5 / sqrt(2000 steps) = 0.011 groups per step."""
    for num_groups, max_clips in ((1, 2), (4, 2), (5, 2), (5, 3)):
        counts = Counter(len(s) for step in range(2000) for s in draw_history_seeds(3, step, num_groups, max_clips))
        assert sorted(counts) == list(range(max_clips + 1))
        for count in counts.values():
            assert count / 2000 == pytest.approx(num_groups / (max_clips + 1), abs=0.045)


def test_rank_0_receives_the_recordings_of_other_replicas():
    """Two replicas have two samples each. Recordings have one clip or, after a history, two."""
    recordings = [np.full((1 + bool(k), 5, 2, 2, 3), k, np.uint8) for k in range(3)]
    groups = [Group(prompt=Prompt(id="p", text="p"), history_seeds=tuple(range(k))) for k in range(3)]
    messages = SimpleQueue()

    def gather(rank, read):
        def transfer_tensor(tensor, owner, target):
            assert (owner, target) == (1, 0)
            if rank == owner:
                messages.put(tensor)
                return tensor
            received = messages.get()
            assert received.shape == tensor.shape
            return received

        world = SimpleNamespace(dp_rank=rank, transfer_tensor=transfer_tensor)
        recipe = SimpleNamespace(
            rl=SimpleNamespace(rollout=SimpleNamespace(group_size=1)),
            data=SimpleNamespace(media_inputs=[]),
            algorithm=SimpleNamespace(conditioning_frame_range=(0, 0)),
        )
        model, sizes = SimpleNamespace(clean_frame_range=lambda frames: frames), SimpleNamespace(samples_per_rank=2)
        return gather_groups(
            SimpleNamespace(world=world, recipe=recipe, model=model, run_sizes=sizes),
            [replace(group, recording=recordings[k] if k in read else None) for k, group in enumerate(groups)],
        )

    gather(1, [2])
    for group, recording in zip(gather(0, [0, 1]), recordings, strict=True):
        np.testing.assert_array_equal(group.recording, recording)


NFT = ("cosmos25_i2v_nft", ["rollout.history={clips: 2}", "data.path=."])
CONTINUATION = "reward.functions=[{name: continuation}]"


@check_each(
    ("overrides", "message"),
    [
        (["sampling.num_frames=1"], "needs videos, but sampling.num_frames is 1"),
        (["algorithm.min_num_conditional_frames=0"], "set algorithm.min_num_conditional_frames above 0"),
        (["rollout={mode: async, group_size: 40, history: {clips: 2}}"], "rollout.group_size 40 is above 16"),
    ],
)
def test_recipes_that_cannot_continue_clips_are_refused(overrides, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe(RECIPES / f"{NFT[0]}.yaml", [*NFT[1], *overrides])


def test_a_loss_on_the_recorded_clips_is_refused():
    overrides = [*NFT[1], "algorithm.min_num_conditional_frames=1", "algorithm.max_num_conditional_frames=1"]
    with pytest.raises(RecipeError, match=r"also trains on: set algorithm.data_beta: 0"):
        load_recipe(RECIPES / "cosmos25_ddrl.yaml", [*overrides, "sampling.num_frames=5", "algorithm.data_beta=0.1"])


@check_each(
    ("overrides", "message"),
    [
        (["data.inputs=[actions]", "rollout.trajectories=shuffle"], "rollout.trajectories shuffle gives samples other"),
        (["rollout.history={clips: 0}", "algorithm.min_num_conditional_frames=0"], "not all samples start with its"),
        (["data.cache_latents=true", "data.cache_dir=.", "data.clip=centre"], "data.cache_latents stores only"),
    ],
)
def test_a_comparison_with_the_recording_is_refused_if_samples_do_not_continue_it(overrides, message):
    recipe = load_recipe(RECIPES / f"{NFT[0]}.yaml", [*NFT[1], CONTINUATION, *overrides])
    with pytest.raises(RecipeError, match=f"reward continuation compares .* but {message}"):
        check_references(recipe)


def test_a_history_without_a_comparison_is_warned_about_and_models_and_libraries_are_checked():
    plain, compared = (load_recipe(RECIPES / f"{NFT[0]}.yaml", [*NFT[1], *more]) for more in ([], [CONTINUATION]))
    check_references(compared)
    assert history_warnings(compared) == []
    (warning,) = history_warnings(plain)
    assert "add the reward continuation" in warning
    model = SimpleNamespace(path="wan", family="wan", conditioning_frame_counts=(0,))
    with pytest.raises(ModelError, match="wan cannot continue a clip"):
        choose_history_layout(plain, model)
    without = load_recipe(RECIPES / f"{NFT[0]}.yaml", ["data.path=."])
    assert choose_history_layout(without, model) is None
    layout = HistoryLayout({1: ClipLayout(5, 1, 1), 2: ClipLayout(9, 5, 2)}, 2, keeps_recordings=False)
    assert layout.num_frames == 17
    actions = SimpleNamespace(library=np.zeros((3, 15, 2)))
    with pytest.raises(RecipeError, match=r"has 15 actions per trajectory, rollout.history.clips 2 needs 16"):
        layout.check_library(actions)
    layout.check_library(SimpleNamespace(library=np.zeros((3, 16, 2))))
