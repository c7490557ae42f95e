import torch
from safetensors.torch import save_file

from benchmarks import export


def write_transformer(folder, **files):
    for name, tensors in files.items():
        (folder / "transformer").mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "transformer" / f"{name}.safetensors")


def test_exports_are_compared_tensor_by_tensor_however_they_are_cut(tmp_path):
    a, b = torch.arange(3.0), torch.ones(2, 2)
    write_transformer(tmp_path / "by_deepspeed", whole={"a": a, "b": b})
    write_transformer(tmp_path / "by_convert", one={"a": a}, two={"b": b})
    write_transformer(tmp_path / "live", whole={"a": a, "b": b})
    assert export.same_weights(tmp_path)
    write_transformer(tmp_path / "by_convert", two={"b": b + 1})
    assert not export.same_weights(tmp_path)
    write_transformer(tmp_path / "by_convert", two={"c": b})
    assert not export.same_weights(tmp_path)


def test_a_child_is_measured_alone(tmp_path):
    held = b"x" * (2 << 30)  # memory of this process, which must not count for the child
    found = export.measure_child("imports", tmp_path)
    assert found["seconds"] > 0
    assert 100 < found["peak MiB"] < len(held) / 2**20
    assert export.summarize_runs([found, found])["seconds"] == {
        "median": found["seconds"],
        "min": found["seconds"],
        "max": found["seconds"],
        "n": 2,
    }
