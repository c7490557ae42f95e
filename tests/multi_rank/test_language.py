"""Runs of vision-language models, against a plain transformers loop, two ranks against one, and resumed runs."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from multi_rank.resuming import ROOT, train_on_rank
from multi_rank.resuming import records as all_records
from wfm_ds.demos.squares_data import write_squares
from wfm_ds.language.model import parameter_group
from wfm_ds.models import registry
from wfm_ds.recipe import file as recipe_file

STEPS = 5
# Some gradients are zero up to rounding (biases of key projections). With a small eps, AdamW makes full steps on them.
EPS = "optimizer.eps=1e-3"
COMMON = [f"run.steps={STEPS}", "logging.console=false", "engine.guard=true", "validation.num_images=3"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The squares data. Every third row has only text; bad.json has invalid rows."""
    folder = tmp_path_factory.mktemp("squares") / "data"
    write_squares(folder)
    file = folder / "annotations.json"
    rows = json.loads(file.read_text())
    for row in rows[1::3]:  # a rank may then have only text
        del row["image"]
        row["conversations"] = [
            {"from": "human", "value": "a cat is"},
            {"from": "gpt", "value": "a cat moving left" + " or right" * (len(rows) % 5)},
        ]
    file.write_text(json.dumps(rows))
    (folder / "bad.json").write_text(json.dumps([{"conversations": []}, {"id": 1}]))
    return folder


def settings(data, folder, *changes, name="reason_llava_sft", model="tiny:qwen25vl"):
    """Return the arguments of `train_on_rank`."""
    places = [f"run.output_dir={folder}", f"data.path={data}/annotations.json", f"data.media_path={data}"]
    recipe = str(ROOT / "tests" / "recipes" / f"{name}.yaml")
    return {"recipe": recipe, "overrides": [*places, f"model.path={model}", *COMMON, *changes]}


def records(folder):
    """Return the lines of metrics.jsonl without times and speeds."""
    return [{tag: v for tag, v in line.items() if not tag.startswith("perf/")} for line in all_records(folder)]


def weights(folder, step=STEPS):
    exported = folder / "safetensors" / f"step_{step}"
    if (exported / "lora").exists():
        return load_file(exported / "lora" / "adapter_model.safetensors")
    return weights_of(exported)


def weights_of(folder):
    network = AutoModelForImageTextToText.from_pretrained(folder)
    return {name: parameter.detach() for name, parameter in network.named_parameters()}


def by_hand(arguments):
    """Train a recipe with a plain loop: one conversation at a time through the transformers model, with its positions
    and loss, and torch's AdamW. Return the weights and the mean loss per step."""
    recipe = recipe_file.load_recipe(Path(arguments["recipe"]), arguments["overrides"])
    model, steps = samples_of_steps(recipe)
    network, options = model.network, recipe.optimizer
    adamw = torch.optim.AdamW(
        network.parameters(), options.lr, betas=options.betas, eps=options.eps, weight_decay=options.weight_decay
    )
    losses = []
    for samples in steps:
        labelled = sum(label >= 0 for sample in samples for label in sample.tokens.labels)
        adamw.zero_grad()
        for sample in samples:
            media = {name: t for kind in ("image",) for name, t in grids_and_values(sample, kind).items()}
            output = network(
                input_ids=torch.tensor([sample.tokens.ids]),
                attention_mask=torch.ones(1, len(sample.tokens), dtype=torch.long),
                mm_token_type_ids=sample.token_types(model.pad_ids),
                labels=torch.tensor([sample.tokens.labels]),
                num_items_in_batch=labelled,
                **media,
            )
            output.loss.backward()
            losses.append(float(output.loss.detach()))
        for parameter in network.parameters():  # without images the vision tower gets grad None
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.nn.utils.clip_grad_norm_(network.parameters(), recipe.engine.max_grad_norm)
        adamw.step()
    return {name: parameter.detach() for name, parameter in network.named_parameters()}, sum(losses) / STEPS


def by_trainer(arguments, folder):
    """Train a recipe with the transformers Trainer, one conversation at a time, and return the weights."""
    from transformers import Trainer, TrainingArguments

    recipe = recipe_file.load_recipe(Path(arguments["recipe"]), arguments["overrides"])
    model, samples = samples_of_steps(recipe)
    rows = [
        {
            "input_ids": torch.tensor([sample.tokens.ids]),
            "attention_mask": torch.ones(1, len(sample.tokens), dtype=torch.long),
            "mm_token_type_ids": sample.token_types(model.pad_ids),
            "labels": torch.tensor([sample.tokens.labels]),
            **grids_and_values(sample, "image"),
        }
        for step in samples
        for sample in step
    ]
    [num_conversations] = {len(step) for step in samples}
    options = recipe.optimizer

    class InOrder(Trainer):
        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(rows)

    trainer = InOrder(
        model.network,
        TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=num_conversations,
            max_steps=recipe.run.steps,
            learning_rate=options.lr,
            lr_scheduler_type="constant",
            adam_beta1=options.betas[0],
            adam_beta2=options.betas[1],
            adam_epsilon=options.eps,
            weight_decay=options.weight_decay,
            max_grad_norm=recipe.engine.max_grad_norm,
            optim="adamw_torch",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
        ),
        data_collator=lambda one: one[0],
        train_dataset=rows,
    )
    trainer.train()
    return {name: parameter.detach() for name, parameter in model.network.named_parameters()}


def samples_of_steps(recipe):
    """Return a new model of the recipe, and the conversations of each step."""
    from wfm_ds.distributed.world import World
    from wfm_ds.language import model as language_model
    from wfm_ds.language.data import load_conversations
    from wfm_ds.training.language_builder import make_row_order, make_sample_reader

    model = language_model.load_language_model(recipe.model.path, torch.float32)
    reader = make_sample_reader(recipe, model)
    data = load_conversations(recipe, reader, World.single_process())
    order = make_row_order(recipe, data)
    per_step = recipe.engine.micro_batch_size * recipe.engine.gradient_accumulation
    steps = [range(step * per_step, (step + 1) * per_step) for step in range(recipe.run.steps)]
    return model, [
        [reader.read(data.training.conversations[i]) for k in rows for i in order.conversations(k)] for rows in steps
    ]


def grids_and_values(sample, kind):
    from wfm_ds.language.packed_sequences import stack_media

    return stack_media([sample]) if sample.media_grids(kind) is not None else {}


def test_it_learns_the_colours_of_squares(one_rank, tmp_path):
    """One corrupt image is skipped and does not stop the run."""
    write_squares(tmp_path / "squares")
    (tmp_path / "squares" / "images" / "003.png").write_bytes(b"")
    arguments = settings(tmp_path / "squares", tmp_path / "run", "run.steps=120", "data.max_bad_fraction=0.1")
    one_rank.run(train_on_rank, **arguments)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["metrics"]["val/token_accuracy"] > 0.95
    assert result["metrics"]["vlm/token_accuracy"] > 0.95
    assert result["metrics"]["data/bad/media"] == 1
    assert Path(result["artifacts"]["model"]).name == "step_120"


def largest_difference(found, wanted):
    return max(float((found[name] - tensor).abs().max()) for name, tensor in wanted.items())


def test_five_steps_are_those_of_a_plain_loop_over_transformers(one_rank, data, tmp_path):
    changes = ["optimizer.lr=1e-2", EPS, "optimizer.schedule=constant", "engine.gradient_accumulation=2"]
    arguments = settings(data, tmp_path / "run", *changes, "checkpoint.every=5")
    one_rank.run(train_on_rank, **arguments)
    wanted, loss = by_hand(arguments)
    assert largest_difference(weights(tmp_path / "run"), wanted) < 1e-6
    steps = [record for record in records(tmp_path / "run") if "vlm/loss" in record]
    assert sum(step["vlm/loss"] for step in steps) / STEPS == pytest.approx(loss, abs=1e-5)


def test_five_steps_are_those_of_transformers_trainer(one_rank, tmp_path):
    """Compare with the Trainer under settings that both support.

    All conversations have images, because the Trainer's AdamW does not update the moments of a vision tower without
    gradients. Weight decay is 0, because the Trainer excludes biases and norms from it. For these models the Trainer
    averages the loss over each micro-batch (here one conversation), then over micro-batches.
    """
    write_squares(tmp_path / "squares")
    changes = ["optimizer.lr=1e-2", EPS, "optimizer.schedule=constant", "optimizer.weight_decay=0", "data.pack=false"]
    changes += ["engine.gradient_accumulation=2", "algorithm.loss_scale=samples"]
    arguments = settings(tmp_path / "squares", tmp_path / "run", *changes)
    one_rank.run(train_on_rank, **arguments)
    found, wanted = weights(tmp_path / "run"), by_trainer(arguments, tmp_path / "trainer")
    assert largest_difference(found, wanted) < 1e-6
    start = weights_of(registry.get_tiny_folder("qwen25vl"))
    assert largest_difference(found, start) > 1e-3  # the weights changed


@pytest.mark.unit
@pytest.mark.parametrize(
    ("family", "stage"),
    [
        ("qwen25vl", "zero3"),
        pytest.param("qwen3vl", "zero2", marks=pytest.mark.slow),
        pytest.param("qwen25vl", "zero1", marks=pytest.mark.slow),
        pytest.param("qwen25vl", "zero2", marks=pytest.mark.slow),
        pytest.param("qwen3vl", "zero3", marks=pytest.mark.slow),
        pytest.param("qwen3vlmoe", "zero3", marks=pytest.mark.slow),
    ],
)
def test_training_on_two_ranks_equals_training_on_one(one_rank, two_ranks, data, tmp_path, family, stage):
    """Some rows have no image. With ZeRO-3 a rank that skips the vision tower would make the other rank hang."""
    same = ["optimizer.lr=1e-2", EPS, "run.steps=3", "data.max_tokens=96", "validation.every=2"]
    one, two = tmp_path / "one", tmp_path / "two"
    model = f"tiny:{family}"
    accumulated = ["engine.micro_batch_size=2", "engine.gradient_accumulation=2"]
    one_rank.run(train_on_rank, **settings(data, one, *same, *accumulated, model=model))
    shared = ["engine.micro_batch_size=1", "engine.gradient_accumulation=2", f"engine.deepspeed={stage}"]
    shared.append("model.gradient_checkpointing=true")
    two_ranks.run(train_on_rank, **settings(data, two, *same, *shared, model=model))
    assert largest_difference(weights(two, 3), weights(one, 3)) < 1e-6
    for a, b in zip(records(one), records(two), strict=True):
        for tag in a.keys() & {"vlm/loss", "vlm/token_accuracy", "vlm/labelled_tokens", "val/loss"}:
            assert a[tag] == pytest.approx(b[tag], abs=1e-5)


@pytest.mark.parametrize("name", ["reason_llava_sft", "reason_llava_sft_lora"])
def test_a_resumed_run_equals_an_uninterrupted_run(two_ranks, data, tmp_path, name):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    model = "tiny:qwen3vl" if name.endswith("lora") else "tiny:qwen25vl"
    changes = ["validation.every=2", "data.max_tokens=96", "ema={decay: 0.9}"]
    if not name.endswith("lora"):
        changes += ["engine.deepspeed=zero3", "algorithm.freeze=[vision]", "algorithm.loss_scale=samples"]
    two_ranks.run(train_on_rank, **settings(data, whole, *changes, name=name, model=model))
    for result in two_ranks.run(train_on_rank, **settings(data, parts, *changes, name=name, model=model), stop_at=2):
        assert (result["status"], result["step"]) == ("preempted", 2)
    for result in two_ranks.run(train_on_rank, **settings(data, parts, *changes, name=name, model=model)):
        assert (result["status"], result["step"]) == ("finished", STEPS)
    assert records(parts) == records(whole)
    ours, theirs = weights(parts), weights(whole)
    base = {} if name.endswith("lora") else weights_of(registry.get_tiny_folder("qwen25vl"))
    assert all(torch.equal(ours[tensor], base[tensor]) for tensor in base if parameter_group(tensor) == "vision")
    assert not any(torch.equal(ours[tensor], base[tensor]) for tensor in base if tensor.endswith("norm.weight"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[tensor], theirs[tensor]) for tensor in theirs)
