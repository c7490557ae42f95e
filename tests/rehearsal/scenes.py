"""What the tests of the ground look at, done in a process of its own, because it imports DeepSpeed for a GPU:
`python scenes.py` prints the outcomes as JSON, a sentence for each.
"""

import json
import sys
import tempfile
from pathlib import Path

from benchmarks.rehearsal import steps
from benchmarks.rehearsal.ground import fake_gpus
from benchmarks.rehearsal.watch import DENOISE, MICRO_STEPS


def error_of(work):
    """Name and text of what `work` raises."""
    try:
        work()
    except (RuntimeError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def asks(module, inputs, output):
    output[0].sum().item()


def copies(module, inputs, output):
    import torch

    output[0].add_(torch.ones(1, 1, 1, 1).to(output[0].device))


def mixes(module, args, kwargs):
    import torch

    return args, {**kwargs, "hidden_states": kwargs["hidden_states"] + torch.ones(1, 1, 1, 1)}


def step_with(loop, record, hook, **how):
    """A step whose denoiser has this hook."""
    module = loop.job.engine.module
    handle = (module.register_forward_pre_hook if how else module.register_forward_hook)(hook, **how)
    record.clear()
    try:
        loop.advance()
    finally:
        handle.remove()


def main():
    import torch

    out = {}
    with fake_gpus(world_size=2) as record, tempfile.TemporaryDirectory() as temporary:
        import torch.distributed as dist

        from benchmarks.rehearsal import runs
        from wfm_ds.distributed.world import World

        folder = Path(temporary)
        recipe, own = steps.STEPS["NFT, LoRA"]
        with runs.loop_of(record, recipe, [*steps.COMMON, *own, *runs.data(recipe, folder)], folder) as loop:
            loop.start()
            loop.run_step()
            record.clear()
            loop.run_step()
            out["rows"] = steps.rows("NFT, LoRA", record)

            def windows():
                return {name: error_of(lambda: record.require_quiet(name)) for name in (DENOISE, MICRO_STEPS)}  # noqa: B023

            out["as it is"] = windows()
            out["collectives"] = [list(key) for key in record.collectives]
            device = World.join().device
            out["device"] = str(device)
            out["nccl"] = error_of(lambda: dist.all_reduce(torch.ones(1)))
            gloo = loop.job.world.host_group
            out["gloo"] = error_of(lambda: dist.all_reduce(torch.ones(1, device=device), group=gloo))
            step_with(loop, record, asks)
            out["asks"] = windows()
            step_with(loop, record, copies)
            out["copies"] = windows()
            out["mixes"] = error_of(lambda: step_with(loop, record, mixes, with_kwargs=True))
    out["undone"] = {
        "cuda": torch.cuda.is_available(),
        "groups": torch.distributed.is_initialized(),
        "sum": float(torch.ones(3).sum()),
    }
    json.dump(out, sys.stdout)


if __name__ == "__main__":
    main()
