"""Sequence parallelism of vision-language models against one rank: losses, gradients, whole runs."""

import copy
import json

import pytest
import torch
import torch.distributed as dist

from conversations import reader_of, samples_of
from each_case import check_each
from multi_rank.resuming import train_on_rank
from multi_rank.test_language import EPS, largest_difference, records, settings, weights
from wfm_ds.demos.squares_data import write_squares
from wfm_ds.errors import UserError
from wfm_ds.language import model as language_model
from wfm_ds.language import sequence_parallel
from wfm_ds.language.annotations import parse_conversation
from wfm_ds.language.packed_sequences import SequencePacker
from wfm_ds.training.language_loop import keep_common_samples

PIXELS = {"pixels": {"min": 1, "max": 9999}}


@pytest.fixture(scope="module")
def squares(tmp_path_factory):
    folder = tmp_path_factory.mktemp("squares") / "data"
    write_squares(folder)
    return folder


def rows_by_name(model, folder):
    """Return rows with even and odd numbers of tokens, a row with an image split across both ranks, and a row without
    labels."""
    reader = reader_of(model, **PIXELS)
    maker = SequencePacker(model.rotary_positions, [reader.blank_sample("image")], by_sample=True)
    text = {"conversations": [{"from": "human", "value": "a cat is"}, {"from": "gpt", "value": "a robot"}]}
    samples = [*samples_of(model, folder, **PIXELS), reader.read(parse_conversation(text, "text"))]
    around = [[samples[3]] * before + samples[:1] + [samples[3]] * after for before in range(4) for after in range(4)]
    cut = next(row for row in map(maker.pack_samples, around) if straddles(model, row))
    return [cut, *(maker.pack_samples(row) for row in (samples, samples[:1], samples[::-1], samples[3:], []))]


def straddles(model, row):
    """Return True if the last token of the first rank and the first token of the second rank are image tokens."""
    middle = sequence_parallel.tokens_per_rank(row.input_ids.shape[1], 2)[0]
    return bool((row.input_ids[0, middle - 1 : middle + 1] == model.pad_ids["image"]).all())


def losses_and_gradients(model, row, scale=1.0):
    model.network.zero_grad()
    found = model.predict(row)
    (scale * found.losses * row.weights).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.network.named_parameters()}
    return found.losses.detach(), found.hits, gradients


def errors_on_rank(family, squares, heads, checkpointing):
    """Return the largest errors of sequence parallelism against one rank, and properties of the rows."""
    from wfm_ds.models.registry import get_tiny_folder

    alone = language_model.load_language_model(str(get_tiny_folder(family)), torch.float32)
    if heads is not None:
        config = copy.deepcopy(alone.config)
        text = config.get_text_config()
        text.num_attention_heads, text.num_key_value_heads = heads
        text.hidden_size, config.vision_config.out_hidden_size = 16 * heads[0], 16 * heads[0]
        torch.manual_seed(3)
        alone.network = type(alone.network)._from_config(config, attn_implementation="sdpa").train()
        alone.forward_module = alone.network
    shared = copy.copy(alone)
    shared.network = shared.forward_module = copy.deepcopy(alone.network)
    shared.group = dist.group.WORLD
    if checkpointing:
        shared.network.gradient_checkpointing_enable({"use_reentrant": False})
    sequence_parallel.install_sequence_parallel(shared.network, dist.group.WORLD)
    worst = {"losses": 0.0, "gradients": 0.0}
    lengths, straddling, empty = [], 0, 0
    for row in rows_by_name(alone, squares):
        losses, hits, gradients = losses_and_gradients(alone, row)
        ours, our_hits, parts = losses_and_gradients(shared, row)
        assert torch.equal(our_hits, hits)
        assert parts.keys() == gradients.keys()
        size = max(float(g.abs().max()) for g in gradients.values()) or 1.0
        for name, part in parts.items():
            dist.all_reduce(part)
            error = float((part - gradients[name]).abs().max()) / size
            worst["gradients"] = max(worst["gradients"], error)
        worst["losses"] = max(worst["losses"], float((ours - losses).abs().max()) if len(losses) else 0.0)
        count = row.input_ids.shape[1]
        straddling += straddles(alone, row)
        empty += 0 in sequence_parallel.labels_per_rank(row.label_positions, count, 2) and len(row.label_positions) > 0
        lengths.append(count)
    return {**worst, "straddling": straddling, "empty": empty, "parities": sorted({n % 2 for n in lengths})}


@pytest.mark.parametrize(
    ("family", "heads", "checkpointing"),
    [("qwen25vl", None, True), ("qwen3vl", None, False), ("qwen25vl", (4, 2), False), ("qwen3vl", (6, 3), True)],
)
def test_two_ranks_have_the_losses_and_the_gradients_of_one(two_ranks, squares, family, heads, checkpointing):
    """The cases have one key/value head for both ranks, one head per rank, and three heads that must be repeated."""
    found = two_ranks.run(errors_on_rank, family=family, squares=str(squares), heads=heads, checkpointing=checkpointing)
    for errors in found:
        assert errors["losses"] < 1e-5
        assert errors["gradients"] < 1e-6
        assert errors["straddling"]  # an image is split across both ranks
        assert errors["empty"]  # a rank has no labelled token
        assert errors["parities"] == [0, 1]


def blank_on_rank():
    """Run a row of one token, which only the first rank has. Return the error and the number of tokens on this rank."""
    from wfm_ds.models.registry import get_tiny_folder

    model = language_model.load_language_model(str(get_tiny_folder("qwen3vl")), torch.float32)
    ids, positions = torch.tensor([[5]]), torch.zeros(4, 1, 1, dtype=torch.long)
    wanted = model.network(input_ids=ids, position_ids=positions, use_cache=False).logits
    sequence_parallel.install_sequence_parallel(model.network, dist.group.WORLD)
    logits = model.network(input_ids=ids, position_ids=positions, use_cache=False).logits
    logits.sum().backward()
    return float((logits - wanted).detach().abs().max()), logits.shape[1]


def test_a_row_shorter_than_the_replica(two_ranks):
    first, second = two_ranks.run(blank_on_rank)
    assert first[0] < 1e-6
    assert (first[1], second[1]) == (1, 1)


def readings_on_rank(squares):
    from wfm_ds.distributed.world import World
    from wfm_ds.models.registry import get_tiny_folder

    model = language_model.load_language_model(str(get_tiny_folder("qwen25vl")), torch.float32)
    world = World.join().with_replicas(2)
    samples = samples_of(model, squares)
    mine = [samples[:2], samples[2:]] if world.rank else [samples[1:2], samples[2:]]
    return [[sample.id for sample in row] for row in keep_common_samples(world, mine)] == [[s.id] for s in samples[1:]]


def test_a_replica_skips_a_conversation_that_one_rank_cannot_read(two_ranks, squares):
    assert two_ranks.run(readings_on_rank, squares=str(squares)) == [True, True]


@check_each(
    ("heads", "kv_heads", "ranks", "times"),
    [(28, 4, 2, 1), (28, 4, 4, 1), (28, 4, 7, 7), (32, 8, 16, 2), (2, 1, 2, 2), (6, 3, 2, 2), (12, 2, 4, 2)],
)
def test_key_heads_are_repeated_for_the_ranks(heads, kv_heads, ranks, times):
    assert sequence_parallel.kv_head_repeats(heads, kv_heads, ranks) == times


def test_indivisible_heads_and_sliding_windows_are_refused():
    model = language_model.load_language_model(
        str(language_model.download_language_model("tiny:qwen25vl")), torch.float32
    )
    with pytest.raises(UserError, match=r"sequence_parallel = 3 does not divide the \d attention heads of the model"):
        sequence_parallel.check_sequence_parallel(model.network, 3)
    sequence_parallel.check_sequence_parallel(model.network, 2)
    model.config.get_text_config().layer_types[0] = "sliding_attention"
    with pytest.raises(UserError, match="the model has sliding-window layers"):
        sequence_parallel.check_sequence_parallel(model.network, 2)


@pytest.mark.parametrize(
    ("family", "stage", "changes"),
    [
        ("qwen25vl", "zero2", []),
        ("qwen3vl", "zero3", []),
        ("qwen3vl", "zero2", ["lora={rank: 4, alpha: 8}"]),
        ("qwen25vl", "zero3", ["algorithm.freeze=[vision, merger]"]),
    ],
)
def test_a_run_of_one_replica_equals_the_run_of_one_rank(
    one_rank, two_ranks, squares, tmp_path, family, stage, changes
):
    same = ["optimizer.lr=1e-2", EPS, "run.steps=3", "data.max_tokens=96", "validation.every=2"]
    same += ["engine.micro_batch_size=1", "engine.gradient_accumulation=2", *changes]
    one, two = tmp_path / "one", tmp_path / "two"
    one_rank.run(train_on_rank, **settings(squares, one, *same, model=f"tiny:{family}"))
    shared = ["engine.sequence_parallel=2", f"engine.deepspeed={stage}", "model.gradient_checkpointing=true"]
    two_ranks.run(train_on_rank, **settings(squares, two, *same, *shared, model=f"tiny:{family}"))
    assert largest_difference(weights(two, 3), weights(one, 3)) < 1e-6
    for a, b in zip(records(one), records(two), strict=True):
        tags = ("vlm/loss", "vlm/token_accuracy", "vlm/labelled_tokens", "vlm/fill", "val/loss", "val/token_accuracy")
        for tag in a.keys() & set(tags):
            assert a[tag] == pytest.approx(b[tag], abs=1e-5)
    assert json.loads((two / "result.json").read_text())["status"] == "finished"
