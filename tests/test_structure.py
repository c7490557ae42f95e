"""The shape of the repository: who imports whom, what stays light, and what every file must and must not hold."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.deepspeed import deepspeed_config, policy_copies

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "wfm_ds": ROOT / "wfm_ds",
    "wfm_kernels": ROOT / "kernels" / "wfm_kernels",
    "wfm_reward": ROOT / "reward" / "wfm_reward",
}
SOURCES = {
    ".".join([name, *path.relative_to(folder).with_suffix("").parts]).removesuffix(".__init__"): path
    for name, folder in PACKAGES.items()
    for path in sorted(folder.rglob("*.py"))
}
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

MAY_UNPICKLE = {"wfm_ds.data.embeddings"}  # arrays alone, through an unpickler that refuses every other name
# Commands that stand in a package for the sake of their name; they may use everything.
PROGRAMS = {"wfm_ds.data.prepare"}
FOREIGN_FORBIDDEN = {
    "wfm_ds.types": {"torch"},
    "wfm_ds.pipes": {"torch", "deepspeed", "diffusers"},
    "wfm_ds.sampling": {"deepspeed", "zmq", "diffusers"},
    "wfm_ds.algorithms": {"deepspeed", "zmq", "diffusers"},
    "wfm_ds.models": {"deepspeed", "zmq"},
    "wfm_ds.ulysses": {"deepspeed", "zmq", "peft"},
    "wfm_ds.data": {"torch", "deepspeed", "zmq"},
    "wfm_reward": {"torch", "deepspeed", "diffusers"},
}
# Modules that do import such a library, once they are in a worker process of their own.
LOADS_MODELS = ("wfm_reward.rewards", "wfm_reward.decoder")


def imports(path):
    """Every module imported anywhere in a file, but not for the type checker only."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from {f"{node.module}.{alias.name}" for alias in node.names} & SOURCES.keys()


def inside(name, package):
    return name == package or name.startswith(f"{package}.")


def test_kernels_import_nothing_but_torch_and_triton():
    allowed = {"wfm_kernels", "torch", "triton", *sys.stdlib_module_names}
    wrong = [
        f"{module} imports {name}"
        for module, path in SOURCES.items()
        if inside(module, "wfm_kernels")
        for name in imports(path)
        if name.split(".")[0] not in allowed
    ]
    assert wrong == []


@pytest.mark.parametrize("module", [m for m in SOURCES if inside(m, "wfm_kernels")])
def test_only_the_modules_about_triton_need_it(module):
    """On a machine without Triton everything else works; what needs it is imported within functions."""
    about_triton = {"wfm_kernels.triton_backend", "wfm_kernels.triton_kernels"}
    at_import = {
        name
        for node in ast.parse(SOURCES[module].read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in imported_by(node)
    }
    needs = {name for name in at_import if name.split(".")[0] == "triton" or name in about_triton}
    assert bool(needs) == (module in about_triton)


def imported_by(node):
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    return {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}


@pytest.mark.parametrize("package", FOREIGN_FORBIDDEN)
def test_package_stays_free_of_heavy_libraries(package):
    wrong = [
        f"{module} imports {name}"
        for module, path in SOURCES.items()
        if inside(module, package) and module not in PROGRAMS and not any(inside(module, m) for m in LOADS_MODELS)
        for name in imports(path)
        if name.split(".")[0] in FOREIGN_FORBIDDEN[package]
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "loop",
    [
        *("training.sft", "training.rl", "training.validation", "run.job", "recipe.derived"),
        *("rollout.colocated", "rollout.source", "rollout.worker"),
    ],
)
def test_loops_name_no_algorithm_and_no_family(loop):
    text = SOURCES[f"wfm_ds.{loop}"].read_text()
    assert not re.search(r"if .*(\.name ==|isinstance\(.*model)|diffusion_nft|stable.?diffusion", text, re.IGNORECASE)


@pytest.mark.parametrize(
    "statement",
    [
        "import wfm_ds",
        "import wfm_ds.recipe.file",
        "import wfm_ds.launch",
        "import wfm_ds.pipes.hub, wfm_ds.pipes.client, wfm_ds.pipes.worker",
        "import wfm_reward.serve, wfm_reward.worker, wfm_reward.registry as r; r.names()",
        "import wfm_ds.train as t; t.parser().format_help()",
        "import wfm_ds.convert as c; c.parser().format_help()",
        "import wfm_ds.generate as g; g.parser().format_help()",
        "import wfm_ds.rollout.worker as w; w.parser().format_help()",
        "import wfm_ds.migrate.command as m; m.parser().format_help()",
        "import wfm_ds.doctor.command as d; d.parser().format_help()",
    ],
)
def test_light_modules_load_nothing_heavy(statement):
    heavy = ("torch", "deepspeed", "diffusers", "transformers", "sklearn")
    code = f"import sys; {statement}; print([m for m in {heavy} if m in sys.modules])"
    path = f"{ROOT}:{ROOT / 'reward'}"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": path}, timeout=60
    )
    assert loaded.stdout.strip() == "[]"


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: str(p.relative_to(ROOT / "recipes")))
def test_every_recipe_resolves_and_its_dump_loads_to_the_same(path, tmp_path):
    recipe = recipe_file.load(path)
    (tmp_path / "resolved.yaml").write_text(recipe_file.dump(recipe), encoding="utf-8")
    assert recipe_file.load(tmp_path / "resolved.yaml") == recipe


def test_every_recipe_on_a_page_is_one(tmp_path):
    found = [text for page in PAGES for text in re.findall(r"```yaml\n(run:.*?)```", page.read_text(), re.DOTALL)]
    assert len(found) > 3
    for text in found:
        (tmp_path / "mine.yaml").write_text(text)
        recipe_file.load(tmp_path / "mine.yaml")


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda p: p.stem)
def test_every_deepspeed_json_merges_with_a_recipe(path):
    sft = recipe_file.load(ROOT / "recipes" / "sd3_image_sft.yaml", [f"engine.deepspeed={path.stem}", "ema=null"])
    config = deepspeed_config(sft, accumulation=1, policies=frozenset(), world_size=8, ranks_per_node=8)
    assert config["zero_optimization"]["stage"] in (1, 2, 3)
    assert policy_copies(frozenset(), lora=False) == frozenset()


def test_roots_of_packages_are_no_packages():
    for folder in ("reward", "recipes", "ds_configs", "kernels"):
        assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_of_the_docs_resolve(page):
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    assert [t for t in targets if not t.startswith("http") and not (page.parent / t).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_that_the_docs_name_exist(page):
    named = re.findall(
        r"`((?:wfm_ds|kernels|reward|recipes|tests|benchmarks|ds_configs|docs)/[\w./]*(?:\.\w+|/))`", page.read_text()
    )
    assert [n for n in named if not (ROOT / n).exists()] == []


def test_sources_are_ascii_and_free_of_what_is_banned():
    wrong = []
    for module, path in SOURCES.items():
        text = path.read_bytes()
        if not text.isascii():
            wrong.append(f"{module} is not ASCII")
        for node in ast.walk(ast.parse(text)):
            names = imported_by(node) if isinstance(node, ast.Import | ast.ImportFrom) else set()
            if ("pickle" in names and module not in MAY_UNPICKLE) or (
                isinstance(node, ast.Attribute) and ast.unparse(node) == "time.sleep"
            ):
                wrong.append(f"{module}:{node.lineno}")
    assert wrong == []


# Modules without a test that imports them, and the test that runs them all the same.
RUN_BY = {
    "wfm_ds.algorithms.base": "algorithms/test_flow_grpo.py",
    "wfm_ds.algorithms.batch": "distributed/test_runs.py",
    "wfm_ds.algorithms.plans": "algorithms/test_flow_grpo.py",
    "wfm_ds.training.checkpoints": "distributed/test_resume.py",
    "wfm_ds.training.exporter": "end_to_end/test_command.py",
    "wfm_ds.checkpoint.foreign": "test_convert.py",
    "wfm_ds.checkpoint.offline": "test_convert.py",
    "wfm_ds.chunks": "distributed/test_runs.py",
    "wfm_ds.run.estimate": "test_preflight.py",
    "wfm_ds.run.job": "distributed/test_runs.py",
    "wfm_ds.models.tiny.parts.umt5": "models/test_families.py",
    "wfm_ds.models.wan": "models/test_families.py",
    "wfm_ds.models.latent_cache": "test_caches.py",
    "wfm_ds.models.loading": "models/test_loading.py",
    "wfm_ds.models.tiny.parts.wan_vae": "models/tiny/test_tiny.py",
    "wfm_ds.models.tiny.parts.weights": "models/tiny/test_tiny.py",
    "wfm_ds.models.tiny.sana": "models/tiny/test_tiny.py",
    "wfm_ds.models.tiny.sana_video": "models/tiny/test_tiny.py",
    "wfm_ds.models.tiny.sd3": "models/tiny/test_tiny.py",
    "wfm_ds.models.tiny.wan22": "models/tiny/test_tiny.py",
    "wfm_ds.models.tiny.wan22_ti2v": "models/tiny/test_tiny.py",
    "wfm_ds.training.outcome": "distributed/test_runs.py",
    "wfm_ds.engine.placement": "distributed/test_placement.py",
    "wfm_ds.quickstart": "end_to_end/test_quickstart.py",
    "wfm_ds.recipe.data": "test_recipe_file.py",
    "wfm_ds.recipe.section": "test_recipe_file.py",
    "wfm_ds.data.replica": "distributed/test_sequence_parallel_runs.py",
    "wfm_ds.training.rl": "distributed/test_runs.py",
    "wfm_ds.rollout.base": "distributed/test_runs.py",
    "wfm_ds.rollout.colocated": "distributed/test_runs.py",
    "wfm_ds.rollout.generator": "distributed/test_async.py",
    "wfm_ds.rollout.groups": "distributed/test_runs.py",
    "wfm_ds.rollout.__main__": "faults/test_rollouts.py",
    "wfm_ds.rollout.source": "distributed/test_async.py",
    "wfm_ds.rollout.worker": "faults/test_rollouts.py",
    "wfm_ds.run.layout": "test_stored_run.py",
    "wfm_ds.sampling.shapes": "algorithms/test_diffusion_nft.py",
    "wfm_ds.ulysses.attention": "distributed/test_ulysses.py",
    "wfm_ds.ulysses.base": "distributed/test_ulysses.py",
    "wfm_ds.ulysses.lines": "distributed/test_ulysses.py",
    "wfm_ds.ulysses.sd3": "distributed/test_ulysses.py",
    "wfm_ds.training.validation": "distributed/test_runs.py",
    "wfm_kernels.checks": "kernels/test_sde_step.py",
    "wfm_kernels.coefficients": "kernels/test_coefficients.py",
    "wfm_kernels.ops": "kernels/test_sde_step.py",
    "wfm_ds.pipes.hub_workers": "pipes/test_hub.py",
    "wfm_ds.pipes.port": "pipes/test_hub.py",
    "wfm_ds.pipes.status": "pipes/test_hub.py",
    "wfm_ds.pipes.submission": "reward/test_client.py",
    "wfm_ds.pipes.tasks": "pipes/test_ledger.py",
    "wfm_reward.program": "reward/test_serve.py",
    "wfm_reward.stats": "reward/test_status_page.py",
    "wfm_reward.web.cosmos": "reward/test_http.py",
    "wfm_reward.web.jobs": "reward/test_http.py",
    "wfm_reward.web.metrics": "reward/test_http.py",
    "wfm_reward.web.npy": "reward/test_http.py",
    "wfm_reward.web.page": "reward/test_status_page.py",
    "wfm_reward.web.plain": "reward/test_http.py",
    "wfm_reward.web.port": "reward/test_http.py",
    "wfm_reward.web.problem": "reward/test_http.py",
    "wfm_reward.web.request": "reward/test_http.py",
    "wfm_reward.web.room": "reward/test_http.py",
    "wfm_reward.web.view": "reward/test_status_page.py",
}


def test_every_module_has_a_test_that_imports_it_or_is_known_to_run_in_one():
    tested = {name for test in (ROOT / "tests").rglob("*.py") for name in imports(test)}
    tested |= {f"{name}.{alias}" for test in (ROOT / "tests").rglob("*.py") for name, alias in imported_names(test)}
    missing = {m for m, p in SOURCES.items() if m not in tested and p.name != "__init__.py" and ".rewards." not in m}
    assert missing - RUN_BY.keys() == set()
    assert [test for test in RUN_BY.values() if not (ROOT / "tests" / test).exists()] == []


def imported_names(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)
