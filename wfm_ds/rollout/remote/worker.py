"""`wfm rollout RECIPE --connect ADDRESS`: a worker process that generates and scores samples for an async run.

On SIGTERM or SIGINT the worker exits, and other workers take over its chunks. Exit codes: 0 when stopped or when the
run is complete, 2 for a user error, 1 otherwise.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import select
import signal
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from wfm_ds.distributed.lifecycle import run_and_exit
from wfm_ds.errors import RecipeError, UserError
from wfm_ds.program import run_with_exit_code
from wfm_ds.rollout import TASK_KIND
from wfm_ds.transport.client import PipeClient
from wfm_ds.transport.keys import ClientKeys, KeyFileError, load_client_keys
from wfm_ds.transport.worker import LeasedTask, LeaseWorker, ReportProgress, TaskFailed, TaskResult

if TYPE_CHECKING:
    from wfm_ds.recipe.schema import Recipe
    from wfm_ds.rollout.remote.generator import ChunkGenerator
    from wfm_ds.rollout.rewards import RewardClient

log = logging.getLogger("wfm_ds.rollout")

ATTACH_S = 60.0
LOOK_S = 1.0  # interval for checking the broker and the lanes
LEAVE_S = 5.0  # maximum time to sign off from the broker
MAX_NAME_CHARS = 60  # messages limit the length of a name, to which the number of a lane is appended
HOST_CHARS = 40
MAX_FAILURE_CHARS = 150  # per reward: all failures of a chunk fit into one message


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="wfm rollout",
        description="Generate samples for an async run on its own device.",
        epilog="Example: wfm rollout outputs/run/recipe.yaml --connect outputs/run/rollout/pipes.json --device cuda:1",
    )
    p.add_argument(
        "recipe", type=Path, help="recipe.yaml in the run's output folder, or the recipe that started the run"
    )
    p.add_argument("overrides", nargs="*", metavar="section.key=value", help="recipe overrides")
    p.add_argument(
        "--connect", required=True, metavar="ADDRESS", help="rollout/pipes.json of the run, or its tcp:// address"
    )
    p.add_argument(
        "--keys",
        type=Path,
        metavar="DIR",
        help="folder with this worker's key and the trainer's public key (default: rollout.keys)",
    )
    p.add_argument("--rewards", metavar="ADDRESS", help="address of the reward service, if it differs on this machine")
    p.add_argument("--device", help="default: cuda if available, else cpu")
    p.add_argument(
        "--name",
        type=_parse_worker_name,
        default=default_worker_name(),
        help="unique name (default: host, pid and a random part)",
    )
    p.add_argument(
        "--orphan-s",
        type=float,
        default=300.0,
        metavar="S",
        help="exit after this many seconds without the trainer (default %(default)g)",
    )
    p.add_argument("--stop-on-eof", action="store_true", help="exit when stdin is closed (the parent process is gone)")
    return p


def default_worker_name() -> str:
    # Host name and pid are not enough: they may be equal in two containers.
    return f"{socket.gethostname()[:HOST_CHARS]}-{os.getpid()}-{uuid.uuid4().hex[:6]}"


def _parse_worker_name(text: str) -> str:
    if not 1 <= len(text) <= MAX_NAME_CHARS:
        raise argparse.ArgumentTypeError(
            f"the name must have 1 to {MAX_NAME_CHARS} characters, got {len(text)}: {text}"
        )
    return text


def run(args: argparse.Namespace) -> NoReturn:
    """Run the worker and end the process, even if a chunk is still being generated."""
    run_and_exit(lambda: run_with_exit_code(lambda: run_worker(args)))


def run_worker(args: argparse.Namespace) -> int:
    from wfm_ds.distributed.accelerator import deterministic_kernels
    from wfm_ds.distributed.logs import quiet_libraries
    from wfm_ds.recipe import file as recipe_file

    stop, is_ready = threading.Event(), threading.Event()

    def request_stop(number: int, frame: FrameType | None) -> None:
        stop.set()
        if not is_ready.is_set():
            os._exit(0)  # the worker has no chunk yet

    if args.stop_on_eof:
        threading.Thread(target=exit_on_eof, args=[is_ready], name="start-up", daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, request_stop)
    signal.signal(signal.SIGUSR1, lambda *_: None)  # SLURM sends it to all processes: only ranks save a checkpoint
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {args.name} %(levelname)s %(message)s")
    quiet_libraries()
    recipe = recipe_file.load_recipe(args.recipe, args.overrides)
    if not recipe.is_async:
        raise RecipeError(f"{args.recipe}: workers need rollout.mode: async, got {recipe.rl.rollout.mode}")
    with deterministic_kernels(recipe.engine.deterministic):
        return serve_chunks(recipe, args, stop, is_ready)


def exit_on_eof(is_ready: threading.Event) -> None:
    """Exit the process if stdin is closed before the worker is ready."""
    while not is_ready.is_set():
        readable, _, _ = select.select([0], [], [], LOOK_S)
        if readable and not os.read(0, 4096):
            os._exit(0)


def serve_chunks(recipe: Recipe, args: argparse.Namespace, stop: threading.Event, is_ready: threading.Event) -> int:
    """Connect to the trainer, load the model, and generate chunks until the worker should exit.

    is_ready: event that is set when the model is loaded. A stop signal before that ends the process at once.
    Raises UserError if trainer, recipe and reward service do not match.
    """
    keys = load_worker_keys(recipe, args.keys)
    client = PipeClient(args.connect, run="workers", client=args.name, keys=keys)
    try:
        client.attach(ATTACH_S)
        info = client.kinds.get(TASK_KIND)
        if info is None:
            raise RecipeError(
                f"{args.connect} is not the trainer of an async run: use rollout/pipes.json in the run's output folder"
            )
        generator = build_generator(recipe, args.device, client, info["identity"])
        lanes = WorkerLanes(recipe, generator, client, keys, info, args)
        is_ready.set()
        return lanes.run(stop)
    finally:
        client.close()


def load_worker_keys(recipe: Recipe, folder: Path | None) -> ClientKeys | None:
    """Load the keys in `folder`, else in rollout.keys, if set. Raises KeyFileError if they are unusable."""
    if folder is None and (folder := recipe.rl.rollout.keys) is not None and not folder.exists():
        raise KeyFileError(
            f"the trainer requires keys but {folder} (rollout.keys) does not exist here: pass --keys DIR with this "
            "worker's keys"
        )
    return None if folder is None else load_client_keys(folder)


def build_generator(
    recipe: Recipe, device: str | None, client: PipeClient, trainer_identity: Mapping[str, Any]
) -> ChunkGenerator:
    import torch

    from wfm_ds.algorithms import build_rl_algorithm
    from wfm_ds.distributed.accelerator import device_context, threads_per_rank
    from wfm_ds.engine import attention_kernels
    from wfm_ds.engine.base_precision import quantise_base
    from wfm_ds.engine.block_compilation import compile_blocks
    from wfm_ds.engine.cuda_graphs import ReplayingNetwork
    from wfm_ds.engine.fp8_linear import set_fast_accumulation
    from wfm_ds.engine.fp8_training import train_in_float8
    from wfm_ds.engine.fused_norms import fuse_norms
    from wfm_ds.engine.preparation import move_weights
    from wfm_ds.models.assets.cache_cleanup import remove_temporary_files
    from wfm_ds.models.assets.loading import select_device
    from wfm_ds.models.assets.text_cache import TextCache, create_text_store, open_store_folder
    from wfm_ds.rollout.histories import choose_history_layout
    from wfm_ds.rollout.remote.generator import ChunkGenerator
    from wfm_ds.rollout.remote.identity import compute_identity, require_same_identity
    from wfm_ds.rollout.remote.weights import PolicyWeights
    from wfm_ds.runs.model_loading import load_model

    torch.set_num_threads(threads_per_rank())
    torch_device = select_device(device)
    with device_context(torch_device):
        model = load_model(recipe, torch_device)
        quantise_base(model.denoiser, model.block_classes, recipe.rollout_precision, model.dtype, torch_device)
        set_fast_accumulation(model.denoiser, not recipe.rl.algorithm.compares_log_probs)
        move_weights(model.denoiser, model.dtype, torch_device)
        train_in_float8(model.denoiser, model.block_classes, recipe.model.fp8_training, model.dtype, torch_device)
        kernel = attention_kernels.choose_kernel(
            recipe.model.attention, model.denoiser, model.dtype, torch_device, trains=False
        )
    attention_kernels.use_kernel(model.denoiser, kernel)
    require_same_identity(trainer_identity, compute_identity(recipe, model))
    if recipe.lora is not None:  # before any text is encoded, as in the trainer
        model.prepare_for_lora(recipe.lora.trainable_layers(model.default_lora_targets))
    remove_temporary_files(recipe.data.cache_dir, time.time())
    store = create_text_store(recipe, model)
    texts = TextCache(model, store=store if store is not None and open_store_folder(store, required=False) else None)
    if texts.folder is not None:  # if the trainer has filled this folder, the text encoders are not needed
        model.move_text_encoders("cpu")
    algorithm = build_rl_algorithm(recipe, model.rollout_sigmas(recipe.sampling), model)
    weights = PolicyWeights(model, client, lora=recipe.lora is not None, merge=recipe.rl.rollout.merge_lora)
    if recipe.engine.fused_norms:
        fuse_norms(model.denoiser)
    if recipe.engine.compile:
        compile_blocks(model.denoiser, model.block_classes, same_sums=recipe.rl.algorithm.compares_log_probs)
    on_chunk_start = None
    if recipe.rl.rollout.cuda_graph:
        network: Any = ReplayingNetwork(model.denoiser)
        model.denoiser, on_chunk_start = network, network.drop_stale_recordings
    return ChunkGenerator(
        model,
        texts,
        recipe.sampling,
        algorithm,
        weights,
        recipe.joint_guidance_batches,
        on_chunk_start,
        # Only the trainer imports the classes of rewards: a task has a recording if one of them needs it.
        choose_history_layout(recipe, model, keeps_recordings=recipe.algorithm.conditioning_frame_range[0] > 0),
    )


class WorkerLanes:
    """The threads of a rollout worker. One thread generates a chunk while the others wait for scores."""

    def __init__(
        self,
        recipe: Recipe,
        generator: ChunkGenerator,
        client: PipeClient,
        keys: ClientKeys | None,
        info: Mapping[str, Any],
        args: argparse.Namespace,
    ) -> None:
        self.recipe, self.generator, self.client, self.args = recipe, generator, client, args
        self.error: UserError | None = None  # stops the worker
        self.info = info  # of the trainer at the start
        self.reward_endpoint = args.rewards or info["rewards"]
        self.reward_clients: list[RewardClient] = []
        patience_s = recipe.rl.rollout.timeout_s + 60.0
        self.lease_workers = [
            LeaseWorker(
                info["workers"],
                worker=f"{args.name}/{i}",
                name=f"{args.name}/{i}",
                kinds=[TASK_KIND],
                keys=keys,
                parent_fd=0 if args.stop_on_eof else None,
                watchdog_s=patience_s,
                ends_process=False,
            )
            for i in range(recipe.rl.rollout.in_flight)
        ]

    def run(self, stop: threading.Event) -> int:
        """Generate chunks until the worker should exit. Raises OutOfMemory if a chunk does not fit into memory."""
        from wfm_ds.rollout.rewards import RewardClient

        reward = self.recipe.rl.reward
        threads = []
        try:
            for i, worker in enumerate(self.lease_workers):
                name = f"{self.args.name}-{i}"
                rewards = RewardClient(self.reward_endpoint, reward, run=self.recipe.run.output_dir.name, client=name)
                self.reward_clients.append(rewards)
                handle = functools.partial(self.generate_chunk, rewards)
                threads.append(threading.Thread(target=worker.run, args=[handle], name=name, daemon=True))
            for thread in threads:
                thread.start()
            log.info("generating for %s", self.args.connect)
            while not any(worker.disconnected.is_set() for worker in self.lease_workers) and not stop.wait(LOOK_S):
                if self.client.silence_s > self.args.orphan_s:
                    log.warning("no trainer for %.0f s (%s): exiting", self.client.silence_s, self.client.problem)
                    break
                if self.client.kinds.get(TASK_KIND) != self.info:  # another recipe or model, or other addresses
                    log.warning("another trainer is at %s: exiting, start a new worker for it", self.args.connect)
                    break
        finally:
            for worker in self.lease_workers:
                worker.stop()
            for thread, worker in zip(threads, self.lease_workers, strict=False):
                if thread.ident is not None:
                    # Its chunks are reassigned at once, without counting as failed attempts.
                    worker.disconnected.wait(LEAVE_S)
            for rewards in self.reward_clients:
                rewards.close()
        if self.error is not None:
            raise self.error
        return 0

    def generate_chunk(self, rewards: RewardClient, task: LeasedTask, progress: ReportProgress) -> TaskResult:
        """Generate and score a task's samples. Raises TaskFailed if that fails.

        Reasons are a malformed task, weights that cannot be loaded, and too little memory.
        """
        from wfm_ds.distributed.accelerator import device_context
        from wfm_ds.memory.advice import OutOfMemory, explain_out_of_memory, suggest_keys_after_oom
        from wfm_ds.rollout.remote.packing import ChunkTask, pack_history, pack_trajectory
        from wfm_ds.rollout.remote.publisher import PolicyManifest
        from wfm_ds.rollout.rewards import pack_scores, submit_finite_samples

        try:
            work = ChunkTask.from_rows(task.rows, task.read_tensors())
            manifest = PolicyManifest.from_json(task.announcement)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise TaskFailed(f"malformed task: {type(error).__name__} {error}", fatal=True) from error
        device = self.generator.sampler.model.device
        try:
            # The current device of a new thread is GPU 0, so set it.
            with (
                device_context(device),
                explain_out_of_memory(
                    device, lambda phase: suggest_keys_after_oom(self.recipe, phase, num_ranks=1), lambda: "rollout"
                ),
            ):
                generated = self.generator.generate_chunk(
                    work, manifest, progress, with_sound=bool(rewards.sound_rewards)
                )
        except OutOfMemory as error:
            self.error = error
            for worker in self.lease_workers:
                worker.stop()  # their chunks go to workers with more memory, without counting as attempts
            raise TaskFailed(str(error), fatal=False) from error
        samples, group, is_video = work.samples, generated.group, self.generator.sampler.model.is_video
        failures = submit_finite_samples(
            rewards,
            generated.images,
            generated.is_finite,
            [s.sample_id for s in samples],
            [group.prompt] * len(samples),
            self.recipe.sampling.fps if is_video else None,
            [group.reference] * len(samples),
            generated.sound,
            self.generator.sampler.model.sound_rate,
        )
        layout, arrays = pack_trajectory(generated.trajectory)
        arrays = [*arrays, *pack_history(group)]
        scores = rewards.wait() | failures
        packed = pack_scores({s.sample_id: scores[s.sample_id] for s in samples}, MAX_FAILURE_CHARS)
        meta = {"life": manifest.session_id, "publication": generated.publication, "clip": group.clip}
        return TaskResult({**meta, "layout": layout, "scores": packed}, arrays)
