"""Environment variables that must be set before torch is imported, and shared fixtures."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Results of MKL otherwise depend on memory addresses on some CPUs, but tests compare runs bit for bit.
os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")
if not os.path.exists("/dev/nvidiactl"):
    # Triton reads this variable at import, and any library may import it first.
    os.environ.setdefault("TRITON_INTERPRET", "1")

import sys
from pathlib import Path

import hypothesis
import pytest

# Time per example depends on the machine's load, so no deadline.
hypothesis.settings.register_profile("wfm", deadline=None)
hypothesis.settings.load_profile("wfm")

ROOT = Path(__file__).parent.parent
# tests/ is not a package; this makes ranks.py and the other helpers importable.
sys.path.insert(0, str(Path(__file__).parent))

RANKS = {"one_rank", "two_ranks", "three_ranks", "four_ranks"}
SLOW_FOLDERS = {"benchmarks", "faults", "kernels", "rehearsal"}
# The folders of the longest files run first, so that no worker is alone with a long file at the end.
FIRST_FOLDERS = ("end_to_end", "reference", "multi_rank", "benchmarks", "rehearsal", "engine", "faults")


def check_ci_cases(items: list[pytest.Item]) -> None:
    """Raise UsageError if a mark `ci_cases` names a case that does not exist."""
    ids = {item.nodeid for item in items}
    for item in items:
        if (kept := item.get_closest_marker("ci_cases")) is not None:
            test = item.nodeid.partition("[")[0]
            if unknown := [case for case in kept.args if f"{test}[{case}]" not in ids]:
                raise pytest.UsageError(f"{test}: ci_cases names cases that do not exist: {unknown}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by folder, and order them. Tests that start ranks or are in SLOW_FOLDERS are slow, unless marked
    `unit`. `ci_cases(ID, ...)`: all other cases of this test are long."""
    if config.option.markexpr:  # a tier, not single cases
        check_ci_cases(items)
    items.sort(key=lambda item: FIRST_FOLDERS.index(name) if (name := item.path.parent.name) in FIRST_FOLDERS else 99)
    for item in items:
        if (kept := item.get_closest_marker("ci_cases")) and item.callspec.id not in kept.args:
            item.add_marker("long")
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
    gc.freeze()  # garbage collections skip the imported packages
    os.environ.pop("TRITON_INTERPRET", None)  # other tests and their subprocesses run without it (kernels/conftest.py)


@pytest.fixture(scope="module", autouse=True)
def no_rank():
    """Check that no file leaves rank variables in the environment: runs of later tests would start as a rank."""
    yield
    left = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT") if name in os.environ]
    assert not left, f"the tests of this file left {left} in the environment: join ranks in processes (ranks.py)"


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def tiny_pipelines(tmp_path_factory: pytest.TempPathFactory):
    """`tiny_pipelines("sd3")` returns the folder of the tiny SD3 pipeline. All tests share it; do not modify it."""
    from wfm_ds.models.tiny import write_tiny_model

    base, made = tmp_path_factory.mktemp("tiny"), {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = base / family
            write_tiny_model(family, made[family])
        return made[family]

    return folder


def create_rank_fixture(name: str, num_ranks: int, scope: str):
    """Create a fixture of processes in one gloo group: `two_ranks.run(function, **kwargs)` (ranks.py).

    The first test that uses the fixture starts the processes, and later tests reuse them, because importing torch and
    DeepSpeed takes longer than most of these tests. Each process takes about half a GiB of memory, so larger groups
    end with their test file.
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
    """Start an S3 server for a test file. Yield its URL and a client that bypasses all proxies."""
    import s3

    with s3.s3_server() as made:
        yield made


@pytest.fixture
def s3_proxy(s3_server, monkeypatch):
    """Route this test's s3:// requests through a proxy that can inject faults. Yield the proxy."""
    import s3

    for name in s3.VARIABLES:
        monkeypatch.setenv(name, "")  # restores the original value after the test
    one = s3.FaultyProxy(s3_server[0])
    s3.use(one.url)
    yield one
    one.close()
