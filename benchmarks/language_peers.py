"""Two trainers of one vision-language model that can run single steps: our loop, and transformers' Trainer."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).parent.parent / "tests" / "recipes" / "reason_llava_sft.yaml"
CONVERSATIONS = 8  # in each step
MAX_TOKENS = 640
ENDLESS = 100_000  # steps
# The conversations of a step: each in one forward pass, all concatenated in one forward pass, or packed into sequences.
# The number of tokens in a step is about equal.
OURS = {
    "one by one": ["data.pack=false", "engine.micro_batch_size=1", f"engine.gradient_accumulation={CONVERSATIONS}"],
    "side by side": ["data.pack=false", f"engine.micro_batch_size={CONVERSATIONS}"],
    "packed": ["engine.micro_batch_size=1", "engine.gradient_accumulation=2"],
}
THEIRS = {
    "one by one": (1, CONVERSATIONS),
    "padded": (CONVERSATIONS, 1),
}  # conversations per forward pass, forward passes per step
COMMON = [
    *("validation.every=0", "validation.at_start=false", "validation.holdout=0", "checkpoint.every=0"),
    *(
        "engine.deepspeed=zero1",
        "logging.console=false",
        "optimizer.lr=1e-5",
        "optimizer.schedule=constant",
        f"run.steps={ENDLESS}",
    ),
    *(f"data.max_tokens={MAX_TOKENS}", "data.workers=1", f"data.pixels={{min: 1, max: {224 * 224}}}"),
]


@dataclass(frozen=True, slots=True)
class Side:
    """A trainer: `step` runs one of its steps, `counts` sums up counts of its forward passes."""

    step: Callable[[], None]
    counts: Counter[str]


def load_side_recipe(folder: Path, name: str) -> Any:
    from wfm_ds.recipe import file as recipe_file

    places = [f"run.output_dir={folder / name}", f"model.path={folder / 'model'}"]
    places += [f"data.path={folder / 'data' / 'annotations.json'}", f"data.media_path={folder / 'data'}"]
    return recipe_file.load_recipe(RECIPE, [*places, *COMMON, *OURS[name]])


def count_forwards(network: Any, counts: Counter[str]) -> None:
    """Make a model count its forward passes, their tokens, and the FLOPs of its head including the backward pass. If it
    receives a mask, it also counts the tokens without padding and the labelled tokens."""

    def count_model_call(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        counts.update(forwards=1, computed=kwargs["input_ids"].numel())
        if "attention_mask" in kwargs:
            counts.update(tokens=int(kwargs["attention_mask"].sum()), labelled=int((kwargs["labels"] >= 0).sum()))

    def count_head_call(head: Any, args: Any, output: Any) -> None:
        rows = output.numel() // head.out_features
        counts.update(head_flops=6 * rows * head.in_features * head.out_features)

    network.register_forward_pre_hook(count_model_call, with_kwargs=True)
    network.lm_head.register_forward_hook(count_head_call)


def make_our_side(folder: Path, name: str, held: contextlib.ExitStack) -> Side:
    """Build our loop with everything around it."""
    from wfm_ds.distributed.lifecycle import StopFlag
    from wfm_ds.distributed.world import World
    from wfm_ds.language.packed_sequences import SequencePacker
    from wfm_ds.runs.output_folder import RunStart
    from wfm_ds.training.language_builder import build_language_loop, load_language_setup

    counts: Counter[str] = Counter()

    class CountingPacker(SequencePacker):
        def pack_samples(self, samples: Sequence[Any]) -> Any:
            for sample in samples:
                labelled = sum(label >= 0 for label in sample.tokens.labels)
                counts.update(tokens=len(sample.tokens), labelled=labelled)
            return super().pack_samples(samples)

    recipe, world = load_side_recipe(folder, name), World.join()
    ready = load_language_setup(recipe, world, lambda _: contextlib.nullcontext())
    loop: Any = build_language_loop(recipe, world, StopFlag(), ready, RunStart(), None, held)
    job = loop.job
    job.row_maker = CountingPacker(job.row_maker._positions, job.row_maker._blanks, by_sample=False)
    count_forwards(job.model.network, counts)
    loop.start()
    return Side(lambda: loop.run_step() and None, counts)


def make_trainer_side(folder: Path, name: str, held: contextlib.ExitStack) -> Side:
    """Build transformers' Trainer in a thread that waits between steps, because its loop cannot run single steps."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from wfm_ds.distributed.world import World
    from wfm_ds.language import model as language_model
    from wfm_ds.language.data import load_conversations
    from wfm_ds.training.language_builder import make_row_order, make_sample_reader

    # Otherwise the Trainer would join a process group.
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE"):
        os.environ.pop(variable, None)
    recipe = load_side_recipe(folder, "one by one")
    model = language_model.load_language_model(recipe.model.path, torch.float32)
    reader = make_sample_reader(recipe, model)
    data = load_conversations(recipe, reader, World.single_process())
    # The same order as our loop's in its first epoch.
    order, conversations = make_row_order(recipe, data), data.training.conversations
    counts: Counter[str] = Counter()
    count_forwards(model.network, counts)

    class ConversationDataset:
        """Reads each conversation when it is accessed, like our loop."""

        def __len__(self) -> int:
            return len(conversations)

        def __getitem__(self, index: int) -> Any:
            (number,) = order.conversations(index)
            return reader.read(conversations[number])

    class StepOnRequest(TrainerCallback):  # type: ignore[misc]
        """Lets the trainer run one step for each request."""

        def __init__(self) -> None:
            self.requested, self.done, self.ended = threading.Semaphore(0), threading.Semaphore(0), False

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.requested.acquire()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.done.release()
            self.requested.acquire()
            control.should_training_stop = self.ended

    stepper, options = StepOnRequest(), recipe.optimizer
    micro, accumulation = THEIRS[name]

    class InOrder(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return range(len(conversations))

    trainer = InOrder(
        model.network,
        TrainingArguments(
            output_dir=str(folder / f"trainer {name}"),
            use_cpu=True,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=accumulation,
            max_steps=ENDLESS,
            learning_rate=options.lr,
            lr_scheduler_type="constant",
            adam_beta1=options.betas[0],
            adam_beta2=options.betas[1],
            weight_decay=options.weight_decay,
            max_grad_norm=recipe.engine.max_grad_norm,
            optim="adamw_torch",
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
        ),
        data_collator=lambda samples: pad_batch(samples, model.pad_ids),
        train_dataset=ConversationDataset(),
        callbacks=[stepper],
    )
    trainer.remove_callback(next(c for c in trainer.callback_handler.callbacks if "Print" in type(c).__name__))
    pool = held.enter_context(ThreadPoolExecutor(1, thread_name_prefix="trainer"))
    running: Future[Any] = pool.submit(trainer.train)

    def stop_trainer() -> None:
        stepper.ended = True
        stepper.requested.release()

    held.callback(stop_trainer)
    running.add_done_callback(lambda _: stepper.done.release())

    def run_step() -> None:
        stepper.requested.release()
        stepper.done.acquire()
        if running.done():
            running.result()

    return Side(run_step, counts)


def pad_batch(samples: Sequence[Any], pad_ids: dict[Any, int]) -> dict[str, Any]:
    """Return a batch as a processor makes it: padded to the longest sample, with a mask. The model computes
    positions."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    from wfm_ds.language.packed_sequences import stack_media

    def pad_values(values: Sequence[Any], fill: int) -> Any:
        return pad_sequence([torch.as_tensor(value) for value in values], batch_first=True, padding_value=fill)

    return {
        "input_ids": pad_values([sample.tokens.ids for sample in samples], 0),
        "attention_mask": pad_values([torch.ones(len(sample.tokens), dtype=torch.long) for sample in samples], 0),
        "labels": pad_values([sample.tokens.labels for sample in samples], -100),
        "mm_token_type_ids": pad_values([sample.token_types(pad_ids)[0] for sample in samples], 0),
        **stack_media(samples),
    }
