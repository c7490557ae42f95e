"""The memory estimate of `--check` matches the memory of a run on the device."""

TOLERANCE = 0.15


def memory_of_steps(folder, root, device):
    """Return the row of measured steps: on a GPU of a model of the released size, on a CPU of a tiny one."""
    from pathlib import Path

    import torch

    from benchmarks.gpu import pipelines, steps
    from benchmarks.gpu.variants import VARIANTS
    from wfm_ds.models.tiny import write_tiny_model

    overrides = [f"model.path={folder}"]
    if device == "cuda":
        pipelines.write_pipeline("sd35m", Path(folder), torch.device("cuda"))
        recipe = Path(root) / "recipes" / "sd3_nft.yaml"
        overrides += ["rollout.prompts_per_step=2", "rollout.group_size=9"]
    else:
        write_tiny_model("sd3", Path(folder))
        recipe = Path(root) / "tests" / "recipes" / "sd3_nft.yaml"
        overrides += ["model.max_sequence_length=16"]
    return steps.measure_steps(recipe, VARIANTS["as shipped"], overrides, 1, None, counts=False)


def test_the_peak_is_near_the_estimate(there, device, tmp_path, root):
    row = there(memory_of_steps, folder=str(tmp_path / "sd35m"), root=str(root), device=device)
    assert row["estimated GiB"] > 0
    if device == "cuda":  # a CPU process has no count of its tensors
        assert 1 - TOLERANCE <= row["allocated / estimated"] <= 1 + TOLERANCE
