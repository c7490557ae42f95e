"""Name of a rollout worker, which identifies it to the broker, and its base weights, which must equal the trainer's."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from each_case import check_each
from wfm_ds.data.clip_layout import ClipLayout
from wfm_ds.engine.fp8_linear import Fp8Linear
from wfm_ds.errors import RecipeError
from wfm_ds.recipe import file as recipe_file
from wfm_ds.rollout.groups import Group, plan_step_samples
from wfm_ds.rollout.remote import worker
from wfm_ds.rollout.remote.generator import ChunkGenerator, CompletedForwards
from wfm_ds.rollout.remote.identity import compute_identity
from wfm_ds.rollout.remote.packing import ChunkTask
from wfm_ds.rollout.remote.worker import MAX_NAME_CHARS, build_generator, default_worker_name, parser
from wfm_ds.runs.model_loading import load_model
from wfm_ds.transport import wire
from wfm_ds.transport.ledger import Ledger, Task
from wfm_ds.transport.worker import TaskFailed
from wfm_ds.types import Prompt

NEEDED = ["recipe.yaml", "--connect", "pipes.json"]


@pytest.fixture
def asked(root):
    def load(*overrides):
        return recipe_file.load_recipe(root / "tests" / "recipes" / "sd3_nft_async.yaml", list(overrides))

    return load


def of_trainer(recipe):
    return compute_identity(recipe, load_model(recipe, torch.device("cpu")))


@pytest.mark.parametrize(
    ("trainer", "here", "named"),
    [
        (["model.base_precision=fp8"], [], r"model, rollout\.base_precision differ"),
        ([], ["rollout.base_precision=fp8"], r"worker's rollout\.base_precision differ"),
        (["rollout.base_precision=fp8"], [], r"worker's rollout\.base_precision differ"),
    ],
)
@pytest.mark.slow
def test_a_worker_with_another_base_than_the_trainer_expects_is_refused(trainer, here, named, asked):
    with pytest.raises(RecipeError, match=named):
        build_generator(asked(*here), "cpu", None, of_trainer(asked(*trainer)))


def test_a_worker_keeps_the_base_as_the_recipe_says(asked):
    recipe = asked("rollout.base_precision=fp8", "run.output_dir=unused")
    generator = build_generator(recipe, "cpu", None, of_trainer(recipe))
    assert isinstance(generator, ChunkGenerator)
    denoiser = generator.sampler.model.denoiser
    assert [part for part in denoiser.modules() if isinstance(part, Fp8Linear)]
    assert {parameter.dtype for parameter in denoiser.parameters()} == {generator.sampler.model.dtype}


def test_a_worker_continues_recordings_without_the_classes_of_rewards(root, tiny_pipelines):
    path = root / "tests" / "recipes" / "cosmos25_i2v_nft.yaml"
    overrides = [f"model.path={tiny_pipelines('cosmos25')}", "model.guardrail=off", "rollout.mode=async"]
    recipe = recipe_file.load_recipe(path, [*overrides, "reward.functions=[{name: 'of_the_trainer:Reward'}]"])
    generator = build_generator(recipe, "cpu", None, of_trainer(recipe))
    assert generator.walker.layout.layouts == {1: ClipLayout(recipe.sampling.num_frames, 1, 1)}


@check_each("changes", [{"history_seeds": (1,)}, {"recording": np.zeros((1, 5, 4, 4, 3), np.uint8)}])
def test_a_task_with_a_history_is_refused_by_a_worker_without_histories(changes, asked):
    recipe = asked("run.output_dir=unused")
    generator = build_generator(recipe, "cpu", None, of_trainer(recipe))
    group = Group(prompt=Prompt(id="p", text="p"), **changes)
    task = ChunkTask(1, plan_step_samples([group], group_size=2, step=1, run_seed=0))
    with pytest.raises(TaskFailed, match="has a history or a recording"):
        generator.generate_chunk(task, None, None)


@check_each(("name", "same_sums"), [("sd3_nft", False), ("sd3_flow_grpo", True)])
def test_a_worker_compiles_sums_in_the_order_of_training_if_log_probabilities_are_compared(
    name, same_sums, root, monkeypatch
):
    overrides = ["engine.compile=true", "rollout.mode=async", "run.output_dir=unused"]
    recipe = recipe_file.load_recipe(root / "tests" / "recipes" / f"{name}.yaml", overrides)
    compiled = []
    monkeypatch.setattr(
        "wfm_ds.engine.block_compilation.compile_blocks", lambda *_, **options: compiled.append(options)
    )
    build_generator(recipe, "cpu", None, of_trainer(recipe))
    assert compiled == [{"same_sums": same_sums}]


class SlowGpu:
    """A GPU on a fake clock. Launching a forward pass takes no time, computing it takes FORWARD_S seconds."""

    FORWARD_S = 100.0

    def __init__(self, on_tick):
        self.now_s = self.busy_until_s = 0.0
        self.on_tick = on_tick

    def make_event(self, blocking=False):
        gpu = self

        class Event:
            def record(self, stream):
                gpu.busy_until_s += gpu.FORWARD_S
                self.end_s = gpu.busy_until_s

            def query(self):
                return gpu.now_s >= self.end_s

            def synchronize(self):
                while not self.query():
                    gpu.now_s += 1.0
                    gpu.on_tick(gpu.now_s)

        return Event()


def test_a_chunk_whose_launches_return_at_once_keeps_its_lease(asked, monkeypatch):
    """With CUDA graphs, the host launches all forward passes of a chunk at once and then waits for the GPU."""
    recipe = asked("run.output_dir=unused", "sampling.steps=6")
    generator = build_generator(recipe, "cpu", None, of_trainer(recipe))
    generator.weights = SimpleNamespace(load_publication=lambda manifest: 0)
    ledger = Ledger({"denoise": 1.5 * SlowGpu.FORWARD_S}, max_waiting=1, max_bytes=1)
    ledger.register_worker("w", frozenset({"denoise"}), 1, ())
    ledger.submit(Task("chunk", "trainer", "denoise", 1, 1e9, payload=None))
    (_,) = ledger.lease_tasks(0.0)
    stalled, reports = [], []
    gpu = SlowGpu(lambda now_s: stalled.extend(ledger.expire_leases(now_s)))
    monkeypatch.setattr(torch.cuda, "Event", gpu.make_event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    on_gpu = functools.partial(CompletedForwards, torch.device("cuda", 0))
    monkeypatch.setattr("wfm_ds.rollout.remote.generator.CompletedForwards", lambda device, report: on_gpu(report))

    def report(done, total):
        reports.append((done, gpu.now_s))
        ledger.record_progress("w", "chunk", 1, done, gpu.now_s)

    task = ChunkTask(1, plan_step_samples([Group(prompt=Prompt(id="p", text="p"))], group_size=2, step=1, run_seed=0))
    generator.generate_chunk(task, None, report)
    assert reports == [(done, done * SlowGpu.FORWARD_S) for done in range(1, 7)]
    assert stalled == []


def test_processes_of_equal_host_and_pid_have_different_names(monkeypatch):
    monkeypatch.setattr(worker.socket, "gethostname", lambda: "h" * 64)
    monkeypatch.setattr(worker.os, "getpid", lambda: 4194304)
    assert default_worker_name() != default_worker_name()
    assert len(default_worker_name()) <= MAX_NAME_CHARS


def test_a_name_that_no_message_can_carry_is_refused(capsys):
    longest = "n" * MAX_NAME_CHARS
    lane = f"{parser().parse_args([*NEEDED, '--name', longest]).name}/15"
    hello = {"worker": lane, "life": "1", "name": lane, "kinds": ["denoise"], "credit": 1, "held": []}
    assert wire.decode_message([wire.encode_header("hello", 1, hello)], frozenset({"hello"})).fields["worker"] == lane
    with pytest.raises(SystemExit, match="2"):
        parser().parse_args([*NEEDED, "--name", longest + "n"])
    assert f"the name must have 1 to {MAX_NAME_CHARS} characters" in capsys.readouterr().err
