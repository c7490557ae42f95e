"""`python -m wfm_ds.rollout RECIPE --connect ADDRESS`: a process that generates samples for an async run.

It needs no DeepSpeed engine and no rank: it leases chunks from the trainer, generates them with the published policy,
has them scored, and returns samples with their scores. SIGTERM or SIGINT: it leaves, and others do what it held. Exit
codes: 0 when told to stop or when the run is over, 2 for an error of the user's, 1 for anything else.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import signal
import socket
import threading
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from wfm_ds.errors import RecipeError, UserError
from wfm_ds.pipes.client import PipeClient
from wfm_ds.pipes.keys import ClientKeys, KeyFileError, client_keys
from wfm_ds.pipes.worker import Answer, LeaseWorker, Progress, TaskFailed, TaskInHand
from wfm_ds.program import program
from wfm_ds.rollout import KIND

if TYPE_CHECKING:
    from wfm_ds.recipe.schema import Recipe
    from wfm_ds.rollout.generator import Generator
    from wfm_ds.rollout.rewards import RewardClient

log = logging.getLogger("wfm_ds.rollout")

ATTACH_S = 60.0
LOOK_S = 1.0  # between looks at the hub and at the lanes
LEAVE_S = 5.0  # to tell the hub
MAX_NAME_CHARS = 60  # with the number of a lane it fits a message
HOST_CHARS = 40
MAX_FAILURE_CHARS = 150  # of a reward: all failures of a chunk fit a message


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="wfm_ds.rollout",
        description="Generate samples for an async run, on a device of its own.",
        epilog="Example: python -m wfm_ds.rollout outputs/run/recipe.yaml --connect outputs/run/rollout/pipes.json "
        "--device cuda:1",
    )
    p.add_argument(
        "recipe", type=Path, help="recipe.yaml of the run's output folder, or the recipe it was started with"
    )
    p.add_argument("overrides", nargs="*", metavar="section.key=value", help="values that replace the recipe's")
    p.add_argument("--connect", required=True, metavar="ADDRESS", help="rollout/pipes.json of the run, or its tcp://")
    p.add_argument(
        "--keys",
        type=Path,
        metavar="DIR",
        help="this worker's key and the trainer's public one (default: rollout.keys)",
    )
    p.add_argument("--rewards", metavar="ADDRESS", help="the reward service, if this machine reaches it elsewhere")
    p.add_argument("--device", help="default: cuda if there is one, else cpu")
    p.add_argument(
        "--name", type=_name, default=default_name(), help="one of its own (default: host, pid and a random part)"
    )
    p.add_argument("--orphan-s", type=float, default=300.0, metavar="S", help="leave when the trainer is gone so long")
    p.add_argument("--stop-on-eof", action="store_true", help="stop when stdin is closed: the parent is gone")
    return p


def default_name() -> str:
    """Containers may share their host's name and have equal pids: two workers of one name take each other's tasks."""
    return f"{socket.gethostname()[:HOST_CHARS]}-{os.getpid()}-{uuid.uuid4().hex[:6]}"


def _name(text: str) -> str:
    if not 1 <= len(text) <= MAX_NAME_CHARS:
        raise argparse.ArgumentTypeError(f"a name has 1 to {MAX_NAME_CHARS} characters, {text!r} has {len(text)}")
    return text


def main(argv: Sequence[str] | None = None) -> int:
    return program(parser(), run, argv)


def run(args: argparse.Namespace) -> int:
    from wfm_ds.distributed.determinism import deterministic
    from wfm_ds.distributed.logs import quieten_libraries
    from wfm_ds.recipe import file as recipe_file

    stop = threading.Event()

    def ask_to_stop(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask_to_stop)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {args.name} %(levelname)s %(message)s")
    quieten_libraries()
    recipe = recipe_file.load(args.recipe, args.overrides)
    if not recipe.is_async:
        raise RecipeError(f"{args.recipe}: rollout.mode is not async: this run's ranks generate their own samples")
    with deterministic(recipe.engine.deterministic):
        return work(recipe, args, stop)


def work(recipe: Recipe, args: argparse.Namespace, stop: threading.Event) -> int:
    """Serve until told to stop. Raises UserError if the trainer, its recipe or its rewards are not what they should."""
    keys = worker_keys(recipe, args.keys)
    client = PipeClient(args.connect, run="workers", client=args.name, keys=keys)
    try:
        client.attach(ATTACH_S)
        info = client.kinds.get(KIND)
        if info is None:
            raise RecipeError(f"{args.connect} is not a trainer of an async run: give rollout/pipes.json of its output")
        generator = build_generator(recipe, args.device, client, info["identity"])
        return Lanes(recipe, generator, client, keys, info, args).run(stop)
    finally:
        client.close()


def worker_keys(recipe: Recipe, folder: Path | None) -> ClientKeys | None:
    """The keys in `folder`, else the trainer's own if this machine has them. Raises KeyFileError."""
    own = recipe.rl.rollout.keys
    if folder is not None:
        return client_keys(folder)
    if own is not None and not own.exists():
        raise KeyFileError(f"this trainer wants keys and {own} is not here: give this worker's by --keys DIR")
    return None if own is None else client_keys(own)


def build_generator(
    recipe: Recipe, device: str | None, client: PipeClient, identity_there: Mapping[str, Any]
) -> Generator:
    import torch

    from wfm_ds.algorithms import build_rl
    from wfm_ds.distributed.accelerator import current
    from wfm_ds.distributed.world import threads_per_rank
    from wfm_ds.engine import attention
    from wfm_ds.engine.base_precision import quantise_base
    from wfm_ds.engine.compiled import compile_blocks
    from wfm_ds.engine.fp8_training import train_in_float8
    from wfm_ds.engine.placement import move
    from wfm_ds.engine.replay import ReplayedNetwork
    from wfm_ds.models.loading import chosen_device
    from wfm_ds.models.text_cache import TextCache
    from wfm_ds.models.text_store import opened, text_store
    from wfm_ds.rollout.generator import Generator
    from wfm_ds.rollout.identity import identity, require_same
    from wfm_ds.rollout.weights import PolicyWeights
    from wfm_ds.run.model import load_model

    torch.set_num_threads(threads_per_rank())
    place = chosen_device(device)
    with current(place):
        model = load_model(recipe, place)
        quantise_base(model.denoiser, model.block_classes, recipe.rollout_precision, model.dtype, place)
        move(model.denoiser, model.dtype, place)
        train_in_float8(model.denoiser, model.block_classes, recipe.model.fp8_training, model.dtype, place)
        kernel = attention.choose(recipe.model.attention, model.denoiser, model.dtype, place, trains=False)
    attention.use(model.denoiser, kernel)
    require_same(identity_there, identity(recipe, model))
    if recipe.lora is not None:  # as the trainer does, before any text is encoded
        model.freeze_all_but(recipe.lora.trained_layers(model.default_lora_targets))
    store = text_store(recipe, model)
    texts = TextCache(model, store=store if store is not None and opened(store, required=False) else None)
    if texts.folder is not None:  # the trainer has filled it, if it is on this machine: they may never be needed
        model.move_text_encoders("cpu")
    algorithm = build_rl(recipe, model.rollout_sigmas(recipe.sampling))
    weights = PolicyWeights(model, client, lora=recipe.lora is not None, merge=recipe.rl.rollout.merge_lora)
    if recipe.engine.compile:
        compile_blocks(model.denoiser, model.block_classes)
    begin = None
    if recipe.rl.rollout.cuda_graph:
        network: Any = ReplayedNetwork(model.denoiser)
        model.denoiser, begin = network, network.begin
    return Generator(model, texts, recipe.sampling, algorithm, weights, recipe.joint_rows, begin)


class Lanes:
    """A worker's chunks in hand: each lane is a thread that leases, generates in its turn, and waits for scores."""

    def __init__(
        self,
        recipe: Recipe,
        generator: Generator,
        client: PipeClient,
        keys: ClientKeys | None,
        info: Mapping[str, Any],
        args: argparse.Namespace,
    ) -> None:
        self.recipe, self.generator, self.client, self.args = recipe, generator, client, args
        self.trouble: UserError | None = None  # why this worker cannot go on
        self.info = info  # of the trainer that it was started for
        self.rewards_at = args.rewards or info["rewards"]
        self.rewards: list[RewardClient] = []
        patience_s = recipe.rl.rollout.timeout_s + 60.0
        self.workers = [
            LeaseWorker(
                info["workers"],
                worker=f"{args.name}/{i}",
                name=f"{args.name}/{i}",
                kinds=[KIND],
                keys=keys,
                parent_fd=0 if args.stop_on_eof else None,
                watchdog_s=patience_s,
                ends_process=False,
            )
            for i in range(recipe.rl.rollout.in_flight)
        ]

    def run(self, stop: threading.Event) -> int:
        """Work until asked to stop, dismissed, or left alone, or until another trainer is at the address. Raises
        OutOfMemory if a chunk needs more memory than there is."""
        from wfm_ds.rollout.rewards import RewardClient

        reward = self.recipe.rl.reward
        threads = []
        try:
            for i, worker in enumerate(self.workers):
                name = f"{self.args.name}-{i}"
                rewards = RewardClient(self.rewards_at, reward, run=self.recipe.run.output_dir.name, client=name)
                self.rewards.append(rewards)
                handle = functools.partial(self.chunk, rewards)
                threads.append(threading.Thread(target=worker.run, args=[handle], name=name, daemon=True))
            for thread in threads:
                thread.start()
            log.info("generates for %s", self.args.connect)
            while not any(worker.left.is_set() for worker in self.workers) and not stop.wait(LOOK_S):
                if self.client.silent_s() > self.args.orphan_s:
                    log.warning("the trainer is gone for %.0f s: %s", self.client.silent_s(), self.client.trouble())
                    break
                if self.client.kinds.get(KIND) != self.info:  # another recipe or model, or it listens elsewhere
                    log.warning("another trainer is at %s: leaves, start a worker for that one", self.args.connect)
                    break
        finally:
            for worker in self.workers:
                worker.stop()
            for thread, worker in zip(threads, self.workers, strict=False):
                if thread.ident is not None:
                    worker.left.wait(LEAVE_S)  # what it holds is given to others at once, and was no attempt
            for rewards in self.rewards:
                rewards.close()
        if self.trouble is not None:
            raise self.trouble
        return 0

    @property
    def advice(self) -> list[str]:
        """The keys to change where a chunk needs more memory than there is."""
        from wfm_ds.run.fit import advice_for

        return advice_for(self.recipe, "rollout", num_ranks=1)

    def chunk(self, rewards: RewardClient, task: TaskInHand, progress: Progress) -> Answer:
        """Samples of one chunk with their scores."""
        from wfm_ds.distributed.accelerator import current
        from wfm_ds.rollout.packing import ChunkWork, pack_trajectory
        from wfm_ds.rollout.publisher import Manifest
        from wfm_ds.rollout.scores import pack_scores, submit_media
        from wfm_ds.run.out_of_memory import OutOfMemory, explained

        try:
            work = ChunkWork.of_rows(task.rows, task.tensors())
            manifest = Manifest.of_json(task.note)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise TaskFailed(f"the task cannot be read: {type(error).__name__} {error}", fatal=True) from error
        place = self.generator.sampler.model.device
        try:
            # A lane is a thread: its own device would be GPU 0.
            with current(place), explained(place, lambda phase: self.advice, lambda: "rollout"):
                made = self.generator.make(work, manifest, progress)
        except OutOfMemory as error:
            self.trouble = error
            for worker in self.workers:  # at once: what they hold is for workers with more memory, and was no attempt
                worker.stop()
            raise TaskFailed(str(error), fatal=False) from error
        names = [function.name for function in self.recipe.rl.reward.functions]
        samples, video = work.samples, self.generator.sampler.model.video
        broken = submit_media(
            rewards,
            names,
            made.media,
            made.finite,
            [s.sample_id for s in samples],
            [s.prompt for s in samples],
            self.recipe.sampling.fps if video else None,
        )
        layout, arrays = pack_trajectory(made.trajectory)
        scores = rewards.wait() | broken
        packed = pack_scores({s.sample_id: scores[s.sample_id] for s in samples}, MAX_FAILURE_CHARS)
        meta = {"life": manifest.life, "publication": made.publication, "layout": layout, "scores": packed}
        return Answer(meta, arrays)
