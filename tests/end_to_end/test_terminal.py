"""The output of commands in a terminal of 80 columns is complete, and its code can be copied."""

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from wfm_ds.demos.digits_data import write_digits

ROOT = Path(__file__).parent.parent.parent
DEADLINE_S = 240
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
MONITOR = """
import contextlib, logging, sys
from pathlib import Path
from wfm_ds.distributed.logs import setup_logging
from wfm_ds.monitoring.monitor import Monitor
setup_logging(None, 0, console=True)
long = "x = [" + ", ".join(["'a word'"] * 40) + "]"
with contextlib.closing(Monitor(Path(sys.argv[1]), is_main=True, console=True, total_steps=2)) as monitor:
    monitor.update_progress(1, samples=1)
    monitor.log_at_close("load it with:\\nimport os\\n" + long)
    monitor.update_progress(2, samples=1)
    monitor.log_message("finished")
"""


def in_terminal(arguments):
    """Run a command in a terminal of 80 columns. Return its output without escape sequences."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80", "LINES": "24", "TERM": "xterm-256color"}
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    seen = b""
    try:
        while part := read(ours):
            seen += part
        assert process.wait(DEADLINE_S) == 0, seen.decode()
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return ESCAPES.sub("", seen.decode()).replace("\r", "")


def read(terminal):
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # the last writer has closed the terminal
        return b""


def copied(text):
    """Return the lines after "load it with:", up to the next log line."""
    after = text.split("load it with:\n", 1)[1].split("\n")
    end = next((i for i, line in enumerate(after) if re.match(r"\d\d:\d\d:\d\d ", line)), len(after))
    return "\n".join(after[:end])


def test_the_last_messages_are_whole_lines_after_the_progress_line(tmp_path):
    text = in_terminal(["-c", MONITOR, str(tmp_path)])
    assert text.index("finished") < text.index("load it with:")
    values = {}
    exec(compile(copied(text), "copied", "exec"), values)
    assert values["x"] == ["a word"] * 40


@pytest.mark.slow
@pytest.mark.long
def test_the_lines_that_load_a_run_can_be_copied_from_its_terminal(tmp_path):
    write_digits(tmp_path / "digits")
    out = tmp_path / ("a_folder_with_a_name_of_some_length_" * 3)
    settings = ["run.steps=1", "validation.at_start=false", "logging.tensorboard=false", f"run.output_dir={out}"]
    settings += [f"data.path={tmp_path / 'digits' / 'images'}", "validation.held_out_rewards=[jpeg_compressibility]"]
    text = in_terminal(["-m", "wfm_ds.train", "tests/recipes/sd3_sft_lora.yaml", *settings])
    code = copied(text)
    compile(code, "copied", "exec")
    assert str(out) in code
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["val/held_out/jpeg_compressibility/mean"] < 0  # SFT runs are scored by held-out rewards too
    assert "val/alarm" not in last
