"""Settings that must hold before torch is imported, and the fixtures that files share."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not os.path.exists("/dev/nvidiactl"):
    # Triton decides when it is imported, by whichever library comes first, whether kernels run in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

import sys
from pathlib import Path

import hypothesis
import pytest

# How long an example takes says more about the machine than about the code.
hypothesis.settings.register_profile("wfm", deadline=None)
hypothesis.settings.load_profile("wfm")

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(Path(__file__).parent))  # for ranks.py and the helpers beside tests: tests/ is no package

RANKS = {"one_rank", "two_ranks", "three_ranks", "four_ranks"}
SLOW_FOLDERS = {"benchmarks", "faults", "kernels", "rehearsal"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their folder. Those that start ranks or are in SLOW_FOLDERS are slow, unless marked `unit`."""
    for item in items:
        folder = item.path.parent.name
        marks = {mark.name for mark in item.iter_markers()}
        is_heavy = folder in SLOW_FOLDERS or not RANKS.isdisjoint(getattr(item, "fixturenames", ()))
        if "long" in marks or (is_heavy and "unit" not in marks):
            item.add_marker("slow")
        if folder == "multi_rank":
            item.add_marker("dist")
        if folder == "faults":
            item.add_marker("faults")
        if folder == "end_to_end":
            item.add_marker("e2e")
        if folder == "gpu":
            item.add_marker("gpu")


def pytest_collection_finish() -> None:
    os.environ.pop("TRITON_INTERPRET", None)  # no business of other tests and of what they start (kernels/conftest.py)


@pytest.fixture(scope="module", autouse=True)
def no_rank():
    """The process of pytest is no rank after a file: every run that a later test starts would believe to be one too."""
    yield
    left = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT") if name in os.environ]
    assert not left, f"the tests of this file left {left} in the environment: join ranks in processes (ranks.py)"


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def tiny_pipelines(tmp_path_factory: pytest.TempPathFactory):
    """`tiny_pipelines("sd3")` is the folder of that tiny pipeline; written once per run, read-only by agreement."""
    from wfm_ds.models.tiny import write_tiny_model

    base, made = tmp_path_factory.mktemp("tiny"), {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = base / family
            write_tiny_model(family, made[family])
        return made[family]

    return folder


def create_rank_fixture(name: str, num_ranks: int, scope: str):
    """Processes of one gloo group: `two_ranks.run(function, **kwargs)` (ranks.py).

    The first test that needs them starts them, and they stay: importing torch and DeepSpeed takes longer than most of
    these tests. Each takes about half a GiB of memory, so that larger groups end with their file.
    """

    @pytest.fixture(scope=scope, name=name)
    def ranks(tmp_path_factory: pytest.TempPathFactory):
        from ranks import started

        with started(num_ranks, tmp_path_factory.mktemp(name)) as pool:
            yield pool

    return ranks


one_rank = create_rank_fixture("one_rank", 1, "session")
two_ranks = create_rank_fixture("two_ranks", 2, "session")
three_ranks = create_rank_fixture("three_ranks", 3, "module")
four_ranks = create_rank_fixture("four_ranks", 4, "module")


@pytest.fixture(scope="module")
def s3_server():
    """An S3 server for the tests of a file: its URL, and a client that writes past all proxies."""
    import s3

    with s3.s3_server() as made:
        yield made


@pytest.fixture
def s3_proxy(s3_server, monkeypatch):
    """What this test's s3:// addresses lead through, and what may fail there."""
    import s3

    for name in s3.VARIABLES:
        monkeypatch.setenv(name, "")  # put back after the test
    one = s3.FaultyProxy(s3_server[0])
    s3.use(one.url)
    yield one
    one.close()
