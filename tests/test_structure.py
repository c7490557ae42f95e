"""Structure of the repository: allowed imports, light modules, banned code, and valid recipes, links and paths."""

import ast
import functools
import re
import subprocess
import sys

from each_case import check_each
from shipped import SHIPPED
from test_layers import COMMANDS_IN_PACKAGES, ROOT, SOURCES
from wfm_ds.cli.main import COMMANDS
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.deepspeed import build_deepspeed_config, policy_copies
from wfm_ds.recipe.schema_description import iterate_sections

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

# Their unpicklers accept only arrays, or only tensors and bytes.
MAY_UNPICKLE = {"wfm_ds.data.embeddings", "wfm_ds.export.cosmos_actions"}
FOREIGN_FORBIDDEN = {
    "wfm_ds.types": {"torch"},
    "wfm_ds.transport": {"torch", "deepspeed", "diffusers"},
    "wfm_ds.sampling": {"deepspeed", "zmq", "diffusers"},
    "wfm_ds.algorithms": {"deepspeed", "zmq", "diffusers"},
    "wfm_ds.models": {"deepspeed", "zmq"},
    "wfm_ds.ulysses": {"deepspeed", "zmq", "peft"},
    "wfm_ds.data": {"torch", "deepspeed", "zmq"},
    "wfm_reward": {"torch", "deepspeed", "diffusers"},
}
# Modules that may import these libraries, because only worker processes load them.
LOADS_MODELS = ("wfm_reward.rewards", "wfm_reward.decoder")


@functools.cache
def imports(path):
    """Return all modules imported anywhere in a file, except imports under TYPE_CHECKING."""
    return tuple(find_imports(ast.parse(path.read_text())))


def find_imports(tree):
    todo = [tree]
    while todo:
        node = todo.pop()
        is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        inner = node.orelse if is_for_types else ast.iter_child_nodes(node)
        todo += [child for child in inner if not isinstance(child, ast.expr)]
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from {f"{node.module}.{alias.name}" for alias in node.names} & SOURCES.keys()


def inside(name, package):
    return name == package or name.startswith(f"{package}.")


def test_kernels_import_nothing_but_torch_triton_and_numpy():
    allowed = {"wfm_kernels", "torch", "triton", "numpy", *sys.stdlib_module_names}
    wrong = [
        f"{module} imports {name}"
        for module, path in SOURCES.items()
        if inside(module, "wfm_kernels")
        for name in imports(path)
        if name.split(".")[0] not in allowed
    ]
    assert wrong == []


@check_each("module", [m for m in SOURCES if inside(m, "wfm_kernels")])
def test_only_triton_modules_import_triton(module):
    """Other modules import Triton inside functions only, so they work on machines without it."""
    about_triton = {
        f"wfm_kernels.{name}" for name in ("triton_backend", "triton_kernels", "norm_triton", "norm_kernels")
    }
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


@check_each("package", FOREIGN_FORBIDDEN)
def test_package_stays_free_of_heavy_libraries(package):
    wrong = [
        f"{module} imports {name}"
        for module, path in SOURCES.items()
        if inside(module, package)
        and module not in COMMANDS_IN_PACKAGES
        and not any(inside(module, m) for m in LOADS_MODELS)
        for name in imports(path)
        if name.split(".")[0] in FOREIGN_FORBIDDEN[package]
    ]
    assert wrong == []


SETTINGS = {section.__name__ for _, _, section in iterate_sections()} | {"AlgorithmSettings", "RlSettings", "Algorithm"}
MAY_KNOW_ALGORITHMS = ("wfm_ds.algorithms", "wfm_ds.recipe")
MAY_KNOW_FAMILIES = ("wfm_ds.models", "wfm_ds.ulysses", "wfm_ds.migrate")


def questions_of_kind(text):
    """Yield (subject, line, expression) of code that branches on the algorithm or the family.

    This covers isinstance and match on settings or `.algorithm`, comparisons of a name with a literal, and lookup
    tables by name.
    """
    for node in ast.walk(ast.parse(text)):
        for subject in sorted(subjects_asked_for(node)):
            yield subject, node.lineno, ast.unparse(node).split("\n")[0]


def subjects_asked_for(node):
    match node:
        case ast.Call(func=ast.Name("isinstance" | "issubclass"), args=[asked, kinds]):
            named = {n.id for n in ast.walk(kinds) if isinstance(n, ast.Name)}
            named |= {n.attr for n in ast.walk(kinds) if isinstance(n, ast.Attribute)}
            return ({"algorithm"} if named & SETTINGS else set()) | {last_word(asked)} & {"algorithm", "family"}
        case ast.Call(func=ast.Name("type"), args=[asked]):
            return {last_word(asked)} & {"algorithm"}
        case ast.Compare(left=left, comparators=comparators) if any(map(is_text, [left, *comparators])):
            return set().union(*map(subject_named, [left, *comparators]))
        case ast.Match(subject=subject, cases=cases):
            patterns = {n.id for case in cases for n in ast.walk(case.pattern) if isinstance(n, ast.Name)}
            return subject_named(subject) | ({"algorithm"} if patterns & SETTINGS else set())
        case ast.Subscript(slice=index):
            return subject_named(index)
    return set()


def last_word(node):
    return ast.unparse(node).split(".")[-1]


def subject_named(node):
    """Return {"algorithm"} for `*.algorithm.name` and `*.settings.name`, {"family"} for `*.family`, else an empty set.

    A method call on one of them counts as well.
    """
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        node = node.func.value
    if not isinstance(node, ast.Attribute) or node.attr not in ("family", "name"):
        return set()
    if node.attr == "family":
        return {"family"}
    return {"algorithm"} if last_word(node.value) in ("algorithm", "settings") else set()


def is_text(node):
    """Return whether the node is or contains a string literal."""
    return any(isinstance(n, ast.Constant) and isinstance(n.value, str) for n in ast.walk(node))


def test_code_does_not_branch_on_the_algorithm_or_the_family():
    """Code specific to one algorithm or family is a property or method of its settings or its class."""
    may_know = {"algorithm": MAY_KNOW_ALGORITHMS, "family": MAY_KNOW_FAMILIES}
    wrong = [
        f"{module}:{line}: {expression}"
        for module, path in SOURCES.items()
        for subject, line, expression in questions_of_kind(path.read_text())
        if not any(inside(module, room) for room in may_know[subject])
    ]
    assert wrong == []


@check_each(
    "text",
    [
        "if isinstance(recipe.algorithm, DdrlAlgorithm): pass",
        "assert isinstance(self.settings, schemas.NftAlgorithm)",
        "ok = isinstance(x, (int, RlSettings))",
        "kind = isinstance(job.recipe.algorithm, Mine)",
        "same = type(recipe.algorithm) is Mine",
        "if recipe.algorithm.name == 'sft': pass",
        "wanted = 'ddrl' != algorithm.name",
        "if recipe.rl.algorithm.name in ('ddrl', 'flow_grpo'): pass",
        "if recipe.algorithm.name.lower() == 'sft': pass",
        "flag = model.family == 'wan'",
        "table = TRAINERS[recipe.algorithm.name]",
        "match recipe.algorithm.name:\n    case 'sft': pass",
        "match settings:\n    case NftAlgorithm(): pass",
    ],
)
def test_branches_on_the_algorithm_or_the_family_are_detected(text):
    assert list(questions_of_kind(text)) != []


@check_each(
    "text",
    [
        "if recipe.is_rl and recipe.algorithm.num_conditional_frames: pass",
        "line = f'algorithm {recipe.algorithm.name}'",
        "if path.name == 'model_index.json' or function.name in known: pass",
        "ok = isinstance(value, str)",
        "same = theirs.algorithm.name == ours.algorithm.name",
    ],
)
def test_other_branches_are_not_reported(text):
    assert list(questions_of_kind(text)) == []


@check_each(
    "statement",
    [
        "import wfm_ds",
        "import wfm_ds.recipe.file, wfm_ds.recipe.deepspeed",
        "import wfm_ds.launch",
        "import wfm_ds.transport.broker, wfm_ds.transport.client, wfm_ds.transport.worker",
        "import wfm_reward.serve, wfm_reward.worker, wfm_reward.registry as r; r.list_reward_names()",
        "import wfm_ds.train as t; t.parser().format_help()",
    ],
)
def test_light_modules_load_nothing_heavy(statement):
    """tests/cli/test_wfm.py checks the commands."""
    heavy = ("torch", "deepspeed", "diffusers", "transformers", "sklearn")
    code = f"import sys; {statement}; print([m for m in {heavy} if m in sys.modules])"
    path = f"{ROOT}:{ROOT / 'reward'}"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": path}, timeout=60
    )
    assert loaded.stdout.strip() == "[]"


@check_each("recipe", SHIPPED.values())
def test_every_recipe_resolves_and_its_dump_loads_to_the_same(recipe, tmp_path):
    (tmp_path / "resolved.yaml").write_text(recipe_file.dump_recipe(recipe), encoding="utf-8")
    assert recipe_file.load_recipe(tmp_path / "resolved.yaml") == recipe


@check_each("path", sorted((ROOT / "ds_configs").glob("*.json")))
def test_every_deepspeed_json_merges_with_a_recipe(path):
    sft = recipe_file.load_recipe(
        ROOT / "recipes" / "sd3_image_sft.yaml", [f"engine.deepspeed={path.stem}", "ema=null"]
    )
    config = build_deepspeed_config(sft, accumulation=1, policies=frozenset(), world_size=8, ranks_per_node=8)
    assert config["zero_optimization"]["stage"] in (1, 2, 3)
    assert policy_copies(frozenset(), lora=False) == frozenset()


def test_root_folders_have_no_init_file():
    for folder in ("reward", "recipes", "ds_configs", "kernels"):
        assert not (ROOT / folder / "__init__.py").exists()


@check_each("page", PAGES)
def test_links_of_the_docs_resolve(page):
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    assert [t for t in targets if not t.startswith("http") and not (page.parent / t).exists()] == []


@check_each("page", PAGES)
def test_files_that_the_docs_name_exist(page):
    named = re.findall(
        r"`((?:wfm_ds|kernels|reward|recipes|tests|benchmarks|ds_configs|docs)/[\w./]*(?:\.\w+|/))`", page.read_text()
    )
    assert [n for n in named if not (ROOT / n).exists()] == []


def test_sources_are_ascii_without_banned_code():
    wrong = []
    for module, path in SOURCES.items():
        text = path.read_bytes()
        if not text.isascii():
            wrong.append(f"{module} is not ASCII")
        if b"pickle" not in text and b"sleep" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            names = imported_by(node) if isinstance(node, ast.Import | ast.ImportFrom) else set()
            if ("pickle" in names and module not in MAY_UNPICKLE) or (
                isinstance(node, ast.Attribute) and node.attr == "sleep" and ast.unparse(node) == "time.sleep"
            ):
                wrong.append(f"{module}:{node.lineno}")
    assert wrong == []


# Registries find rewards and families by name, and tests cover everything in the registries.
LOADED_BY_NAME = ("wfm_reward.rewards", "wfm_ds.models.tiny", "wfm_ds.models.wan", "wfm_ds.ulysses")


def is_command_run(name, texts):
    """Return whether the texts of tests contain a call that runs a command of `wfm` with arguments."""
    words = r'",\s*"'.join(name.split())
    pattern = rf'wfm_command\("{name}"\)|(main\(\[|wfm\(|run_module\(|"wfm_ds",\s*)"{words}",'
    return re.search(pattern, texts) is not None


def test_every_module_is_imported_or_started_by_a_test():
    """Every module is imported or started by a test, directly or through other modules."""
    tests = list((ROOT / "tests").rglob("*.py"))
    texts = "\n".join(test.read_text() for test in tests)
    reached = {module for name, (module, _) in COMMANDS.items() if is_command_run(name, texts)}
    reached |= {name for test in tests for name in imports(test) if name in SOURCES}
    named = set(re.findall(r"\bwfm_\w+(?:\.\w+)*", texts)) & SOURCES.keys()
    reached |= named | {f"{name}.__main__" for name in named}
    todo = list(reached)
    while todo:
        module = todo.pop()
        used = set(imports(SOURCES[module])) & SOURCES.keys() if module in SOURCES else set()
        todo += used - reached
        reached |= used
    missing = {
        module
        for module, path in SOURCES.items()
        if module not in reached and path.name != "__init__.py" and not any(inside(module, m) for m in LOADED_BY_NAME)
    }
    assert sorted(missing) == []
