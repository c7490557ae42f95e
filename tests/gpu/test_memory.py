"""The memory estimate of `--check` matches the memory of a run on the device."""

TOLERANCE = 0.15


def share_of_the_estimate(folder, root):
    """Return the peak of allocated memory relative to the estimate, for a model of the released size."""
    from pathlib import Path

    import torch

    from benchmarks.gpu import pipelines, steps
    from benchmarks.gpu.variants import VARIANTS

    pipelines.write_pipeline("sd35m", Path(folder), torch.device("cuda"))
    overrides = [f"model.path={folder}", "rollout.prompts_per_step=2", "rollout.group_size=9"]
    row = steps.measure_steps(Path(root) / "recipes" / "sd3_nft.yaml", VARIANTS["as shipped"], overrides, 1, None)
    return row["allocated / estimated"]


def test_the_peak_is_near_the_estimate(there, cuda, tmp_path, root):
    found = there(share_of_the_estimate, folder=str(tmp_path / "sd35m"), root=str(root))
    assert 1 - TOLERANCE <= found <= 1 + TOLERANCE
