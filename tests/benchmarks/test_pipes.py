"""The benchmark of the pipes runs all peers, on tensors that are too small for meaningful speeds."""

from benchmarks import pipes


def test_all_peers_are_measured_side_by_side(capsys, monkeypatch, root):
    monkeypatch.setenv("PYTHONPATH", str(root))
    assert pipes.main(["--mib", "1", "--rounds", "1", "--seconds", "0.01"]) == 0
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert [line[1] for line in lines[2:]] == ["raw pyzmq", "wfm_ds.transport", "pickle, HTTP"] * 2
    assert all(float(line[3].split()[0]) > 0 for line in lines[2:])
