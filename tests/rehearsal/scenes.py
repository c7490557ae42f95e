"""Scenes for the tests of the simulated machine, in a separate process because DeepSpeed is imported for a GPU.

`python scenes.py` prints the outcomes as JSON, one message for each.
"""

import json
import sys
import tempfile
from pathlib import Path

from benchmarks.rehearsal.fake_machine import fake_gpus
from benchmarks.rehearsal.watch import DENOISE, MICRO_STEPS

SETTINGS = (
    *("model.dtype=bfloat16", "engine.deepspeed=zero2", "engine.micro_batch_size=2", "engine.max_forward_batch=4"),
    *("rollout.prompts_per_step=2", "rollout.group_size=4", "sampling.guidance_scale=2.0"),
)


def catch_error(work):
    """Return the name and text of the exception that `work` raises."""
    try:
        work()
    except (RuntimeError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def read_number(module, inputs, output):
    output[0].sum().item()


def copy_to_device(module, inputs, output):
    import torch

    output[0].add_(torch.ones(1, 1, 1, 1).to(output[0].device))


def mix_devices(module, args, kwargs):
    import torch

    return args, {**kwargs, "hidden_states": kwargs["hidden_states"] + torch.ones(1, 1, 1, 1)}


def step_with_hook(loop, record, hook, **how):
    """Run a step with a hook on the denoiser."""
    module = loop.job.engine.module
    handle = (module.register_forward_pre_hook if how else module.register_forward_hook)(hook, **how)
    record.clear()
    try:
        loop.run_step()
    finally:
        handle.remove()


def main():
    import torch

    out = {}
    with fake_gpus(world_size=2) as record, tempfile.TemporaryDirectory() as temporary:
        import torch.distributed as dist

        from benchmarks.rehearsal import runs
        from wfm_ds.distributed.world import World
        from wfm_ds.engine.fused_norms import fuse_norms

        folder = Path(temporary)
        with runs.open_loop(record, "sd3_nft", [*SETTINGS, *runs.data_overrides("sd3_nft", folder)], folder) as loop:
            loop.start()
            loop.run_step()
            record.clear()
            loop.run_step()

            def check_windows():
                return {name: catch_error(lambda: record.require_quiet(name)) for name in (DENOISE, MICRO_STEPS)}  # noqa: B023

            out["as it is"] = check_windows()
            out["collectives"] = [list(key) for key in record.collectives]
            device = World.join().device
            out["device"] = str(device)
            out["nccl"] = catch_error(lambda: dist.all_reduce(torch.ones(1)))
            gloo = loop.job.world.host_group
            out["gloo"] = catch_error(lambda: dist.all_reduce(torch.ones(1, device=device), group=gloo))
            step_with_hook(loop, record, read_number)
            out["read_number"] = check_windows()
            step_with_hook(loop, record, copy_to_device)
            out["copy_to_device"] = check_windows()
            fuse_norms(loop.job.engine.module)
            record.clear()
            loop.run_step()
            out["fused norms"] = check_windows()
            out["mix_devices"] = catch_error(lambda: step_with_hook(loop, record, mix_devices, with_kwargs=True))
    out["undone"] = {
        "cuda": torch.cuda.is_available(),
        "groups": torch.distributed.is_initialized(),
        "sum": float(torch.ones(3).sum()),
    }
    json.dump(out, sys.stdout)


if __name__ == "__main__":
    main()
