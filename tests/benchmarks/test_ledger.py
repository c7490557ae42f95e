"""The benchmark of the ledger runs, and reports both ledgers."""

from benchmarks import ledger


def test_both_ledgers_do_the_same_work(capsys):
    assert ledger.main(["--waiting", "20", "--turns", "150", "--rounds", "1", "--drain", "300"]) == 0
    table = capsys.readouterr().out
    assert table.count("scan") == table.count("ledger") == 2
