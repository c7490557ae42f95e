"""Parts of the benchmark that run without a GPU: its counts, and the check of results before measuring."""

import pytest
import torch

from benchmarks import cases, kernels, report
from benchmarks.counting import count_launches
from benchmarks.peers import pointwise

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = (3, 4, 7, 5)


def test_counts_of_known_operations():
    a, b = torch.randn(2, 64), torch.randn(64)
    one = count_launches(lambda: a + b.expand(2, 64), 128)  # the expanded tensor counts as 64 elements
    assert (one.launches, one.small_launches, one.syncs, one.num_bytes) == (1, 0, 0, 4 * (128 + 64 + 128))
    free = count_launches(lambda: torch.empty(128).view(2, 64).detach()[0], 128)
    assert (free.launches, free.syncs, free.num_bytes) == (0, 0, 0)
    waits = count_launches(lambda: (a.sum().item(), (a > 9).nonzero()), 128)
    assert waits.syncs == 2
    assert count_launches(lambda: b * 2, 128).small_launches == 1


@pytest.mark.parametrize(
    ("name", "launches", "bytes_per_element"),
    [
        ("sde_step", 2, 10),
        ("sde_log_prob, forward and backward", 3, 22),
        ("nft_loss, forward and backward", 3, 26),
        ("nft_loss with reference, forward and backward", 3, 30),
        ("flow_noise", 1, 12),
    ],
)
def test_kernels_touch_each_tensor_once_and_never_wait(name, launches, bytes_per_element):
    """The counts of docs/measurements.md; partial sums and per-sample values add up to 2 %."""
    case = next(c for c in cases.CASES if c.name == name)
    i = cases.make_inputs((2, 16, 32, 32), DEVICE, seed=0)
    counted = count_launches(lambda: case.ours(i, "triton"), i.x.numel())
    assert (counted.launches, counted.syncs) == (launches, 0)
    assert bytes_per_element <= counted.num_bytes / i.x.numel() <= 1.02 * bytes_per_element


def test_all_operators_and_the_plain_formulas_are_right_before_anything_is_measured():
    checks = kernels.check_operators(SMALL, DEVICE)
    assert [check for check in checks if not check["correct"]] == []
    assert len(checks) == 2 * len(cases.CASES) + 3 + 2


def test_a_wrong_operator_stops_the_benchmark(monkeypatch, capsys):
    monkeypatch.setattr(kernels, "count_rows", lambda *a: pytest.fail("measured"))
    monkeypatch.setattr(
        pointwise, "sde_log_prob", lambda v, x, x_next, *rest: x_next.flatten(1).mean(1) + 0 * v.flatten(1).sum(1)
    )
    assert kernels.main(["--no-write"]) == 1
    assert "nothing was measured" in capsys.readouterr().err


def test_results_name_their_machine_and_make_a_table(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    about = report.describe_machine()
    assert about["torch"] == torch.__version__
    assert about["cores"] >= 1
    rows = [{"a": 1.23456, "us": {"median": 2.0, "min": 1.0, "max": 3.0, "n": 7}}, {"a": "x", "b": True}]
    path = report.write_results("test", about | {"gpu": "NVIDIA H200"}, rows)
    assert path.name == f"{about['date']}-nvidia-h200-test.json"
    page = (tmp_path / "README.md").read_text()
    assert "| 1.235 | 2 (1-3) |  |" in page
    assert "| x |  | True |" in page
