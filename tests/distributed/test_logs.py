import logging
import re
import subprocess
import sys
import warnings

import pytest

from wfm_ds.distributed.logs import close_logging, setup_logging
from wfm_ds.errors import UserError


@pytest.fixture(autouse=True)
def restored_logging():
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    close_logging()
    logging.captureWarnings(False)
    root.setLevel(level)
    assert [h for h in root.handlers if h not in handlers and not isinstance(h, logging.NullHandler)] == []


def lines(path):
    return path.read_text(encoding="utf-8").splitlines()


def test_every_rank_has_a_file_with_time_rank_and_logger(tmp_path):
    setup_logging(tmp_path, 3, console=True)
    logging.getLogger("wfm_ds.engine.engine").info("ready: %d", 7)
    logging.getLogger("wfm_ds.engine.engine").debug("too much")
    (line,) = lines(tmp_path / "logs" / "rank_3.log")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z rank 3 INFO wfm_ds\.engine\.engine: ready: 7", line)


def test_the_console_shows_info_logs_of_wfm_ds_and_all_warnings_of_rank_0(tmp_path, capsys):
    for rank, shown in ((0, ["INFO ours", "WARNING theirs"]), (1, [])):
        setup_logging(tmp_path, rank, console=True)
        logging.getLogger("wfm_ds.training.rl").info("ours")
        logging.getLogger("wfm_dsx").info("a foreign line")
        logging.getLogger("library").info("not shown")
        logging.getLogger("library").warning("theirs")
        output = capsys.readouterr()
        assert [line.split(" ", 1)[1] for line in output.err.splitlines()] == shown
        assert output.out == ""
        assert len(lines(tmp_path / "logs" / f"rank_{rank}.log")) == 4


def test_truncated_prompts_are_reported_once_for_each_limit(tmp_path, capsys):
    setup_logging(tmp_path, 0, console=True)
    for prompt in ("a", "b"):
        for limit in ("CLIP can only handle sequences up to 77 tokens", "`max_sequence_length` is set to  256 tokens"):
            text = f"The following part of your input was truncated because {limit}: ['{prompt}']"
            logging.getLogger("diffusers.pipelines.sd3").warning(text)
            logging.getLogger("diffusers.pipelines.sd3").warning("another warning")
    for shown in (capsys.readouterr().err, (tmp_path / "logs" / "rank_0.log").read_text()):
        assert shown.count("another warning") == 4
        assert re.findall(r"handle .*|is set .*", shown) == [
            "handle sequences up to 77 tokens: ['a']; warnings about other truncated prompts are not shown",
            "is set to  256 tokens: ['a']; warnings about other truncated prompts are not shown",
        ]


def test_console_off_hides_even_warnings(tmp_path, capsys):
    setup_logging(None, 0, console=False)
    logging.getLogger("wfm_ds").warning("unseen")
    output = capsys.readouterr()
    assert output.out + output.err == ""
    assert list(tmp_path.iterdir()) == []


def test_a_second_setup_replaces_the_first(tmp_path, capsys):
    setup_logging(None, 0, console=True)
    setup_logging(tmp_path, 0, console=True)
    logging.getLogger("wfm_ds").info("once")
    assert capsys.readouterr().err.count("once") == 1
    assert len(lines(tmp_path / "logs" / "rank_0.log")) == 1


def test_console_follows_a_replaced_stderr(monkeypatch):
    import io

    setup_logging(None, 0, console=True)
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)  # rich does this while it shows a progress line
    logging.getLogger("wfm_ds").info("above the bar")
    assert screen.getvalue().endswith("INFO above the bar\n")


def test_python_warnings_are_logged(tmp_path):
    setup_logging(tmp_path, 0, console=False)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("mind the gap", UserWarning, stacklevel=1)
    assert "mind the gap" in (tmp_path / "logs" / "rank_0.log").read_text()


def test_unwritable_folder_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"rank_0\.log: cannot write the log \(Not a directory\)"):
        setup_logging(tmp_path / "file", 0, console=True)


@pytest.mark.slow
def test_noisy_libraries_warn_once_on_the_console_and_with_their_rank_in_the_file(tmp_path):
    script = (
        "import logging, sys; from pathlib import Path\n"
        "import deepspeed, diffusers, transformers\n"
        "from wfm_ds.distributed.logs import setup_logging\n"
        "setup_logging(Path(sys.argv[1]), 0, console=True)\n"
        "for name in ('DeepSpeed', 'diffusers.models', 'transformers.models', 'torch.distributed.launch'):\n"
        "    logging.getLogger(name).info('chatter')\n"
        "    logging.getLogger(name).warning('trouble in ' + name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    )
    file = (tmp_path / "logs" / "rank_0.log").read_text()
    for text in (done.stderr, file):
        assert "chatter" not in text
        for name in ("DeepSpeed", "diffusers.models", "transformers.models", "torch.distributed.launch"):
            assert text.count(f"trouble in {name}") == 1
    assert "trouble" not in done.stdout
