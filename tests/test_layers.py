"""Packages are in layers, and imports point only to lower layers.

Type imports and imports inside functions count too: both are dependencies of the module.
"""

import ast
import functools
import re
from pathlib import Path

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
LAYERS = (
    ("errors", "types", "seeds", "chunks", "tensor_memory", "wfm_kernels"),
    ("program", "user_class", "storage"),
    ("recipe", "transport", "ulysses"),
    ("distributed", "sampling", "wfm_reward"),
    ("engine", "data", "algorithms"),
    ("models", "monitoring"),
    ("export",),
    ("checkpoint", "memory"),
    ("runs", "language", "evaluation", "contract"),
    ("rollout",),
    ("training",),
    ("demos",),
    ("train", "launch", "migrate"),
    ("cli",),
    ("__main__",),
)
LAYERS_BY_PACKAGE = {package: layer for layer, packages in enumerate(LAYERS) for package in packages}
# Commands that are in a package because of their name. They may import everything; no module may import them.
COMMANDS_IN_PACKAGES = {"wfm_ds.data.prepare"}
MAX_TOP_LEVEL_MODULES = 15


def package_name(module):
    """Return `recipe` for wfm_ds.recipe.file, `train` for wfm_ds.train, `wfm_reward` for all of it, None for wfm_ds."""
    package, _, inner = module.partition(".")
    return (inner.split(".")[0] or None) if package == "wfm_ds" else package


def imported_modules(module):
    """Yield the modules of this project that a module imports anywhere in its source."""
    for node in ast.walk(ast.parse(SOURCES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in SOURCES)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES:
            assert not node.level, f"{module}:{node.lineno} has a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in SOURCES else node.module


@functools.cache
def imports_by_module():
    return {module: set(imported_modules(module)) - {module} for module in SOURCES}


def test_every_package_has_a_layer():
    packages = {package_name(module) for module in SOURCES} - {None}
    assert packages == LAYERS_BY_PACKAGE.keys()


def test_imports_point_to_lower_layers():
    def layer(module):
        return len(LAYERS) if module in COMMANDS_IN_PACKAGES else LAYERS_BY_PACKAGE[package_name(module)]

    wrong = [
        f"{module} (layer {layer(module)}) imports {used} (layer {layer(used)})"
        for module, imports in imports_by_module().items()
        for used in imports
        if used != "wfm_ds" and (package_name(used) != package_name(module) or used in COMMANDS_IN_PACKAGES)
        if layer(used) >= layer(module)
    ]
    assert wrong == []


def test_no_import_cycles():
    left = {
        module: {used for used in imports if not module.startswith(f"{used}.")}  # a module is inside its package
        for module, imports in imports_by_module().items()
    }
    while leaves := {module for module, imports in left.items() if not imports & left.keys()}:
        left = {module: imports for module, imports in left.items() if module not in leaves}
    used_in_cycle = set().union(*left.values())
    assert sorted(module for module in left if module in used_in_cycle) == []


def test_few_modules_are_outside_packages():
    assert len(list(PACKAGES["wfm_ds"].glob("*.py"))) <= MAX_TOP_LEVEL_MODULES


def test_the_docs_list_every_package_in_its_layer():
    page = (ROOT / "docs" / "architecture.md").read_text()
    listed, layer = {}, None
    for cells in ([cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line[:1] == "|"):
        if len(cells) == 4 and (cells[0].isdigit() or not cells[0]):
            layer = int(cells[0] or layer)
            listed |= dict.fromkeys(re.findall(r"`(\w+)/?`", cells[1]), layer)
    assert listed == LAYERS_BY_PACKAGE
