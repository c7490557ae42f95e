"""The house: every room of the packages stands on a floor, and an import leads down.

Type imports and imports inside functions count too: whoever reads a module needs what it names, at run time or not.
"""

import ast
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
FLOORS = (
    ("errors", "types", "seeds", "chunks", "pinned", "wfm_kernels"),
    ("program", "user_class"),
    ("recipe", "storage", "pipes", "ulysses"),
    ("distributed", "sampling", "wfm_reward"),
    ("engine", "data", "algorithms"),
    ("models", "monitoring"),
    ("checkpoint",),
    ("run", "language", "evaluation", "contract"),
    ("rollout",),
    ("training",),
    ("train", "generate", "convert", "quickstart", "launch", "recipe_docs", "doctor", "migrate"),
    ("command",),
    ("__main__",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# A command that stands in a room for the sake of its name: nobody imports it, and it may use everything.
COMMANDS_IN_ROOMS = {"wfm_ds.data.prepare", "wfm_ds.models.check", "wfm_ds.monitoring.page"}
MOST_ON_TOP = 15


def room_of(module):
    """`recipe` of wfm_ds.recipe.file, `train` of wfm_ds.train, `wfm_reward` of all in it; None of wfm_ds itself."""
    package, _, inner = module.partition(".")
    return (inner.split(".")[0] or None) if package == "wfm_ds" else package


def used_by(module):
    """The modules of ours that this one imports, wherever in its text."""
    for node in ast.walk(ast.parse(SOURCES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in SOURCES)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES:
            assert not node.level, f"{module}:{node.lineno} imports relatively"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in SOURCES else node.module


IMPORTS = {module: set(used_by(module)) - {module} for module in SOURCES}


def test_every_room_has_a_floor_and_every_floor_names_rooms():
    rooms = {room_of(module) for module in SOURCES} - {None}
    assert rooms == FLOOR_OF.keys()


def test_imports_lead_down():
    def floor(module):
        return len(FLOORS) if module in COMMANDS_IN_ROOMS else FLOOR_OF[room_of(module)]

    wrong = [
        f"{module} (floor {floor(module)}) imports {used} (floor {floor(used)})"
        for module, all_used in IMPORTS.items()
        for used in all_used
        if used != "wfm_ds" and (room_of(used) != room_of(module) or used in COMMANDS_IN_ROOMS)
        if floor(used) >= floor(module)
    ]
    assert wrong == []


def test_no_modules_import_each_other_in_a_circle():
    left = {
        module: {used for used in all_used if not module.startswith(f"{used}.")}  # each is inside its package
        for module, all_used in IMPORTS.items()
    }
    while leaves := {module for module, all_used in left.items() if not all_used & left.keys()}:
        left = {module: all_used for module, all_used in left.items() if module not in leaves}
    used_in_circle = set().union(*left.values())
    assert sorted(module for module in left if module in used_in_circle) == []


def test_few_modules_stand_outside_the_rooms():
    assert len(list(PACKAGES["wfm_ds"].glob("*.py"))) <= MOST_ON_TOP


def test_the_map_in_the_docs_shows_every_room_on_its_floor():
    page = (ROOT / "docs" / "architecture.md").read_text()
    shown, floor = {}, None
    for cells in ([cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line[:1] == "|"):
        if len(cells) == 4 and (cells[0].isdigit() or not cells[0]):
            floor = int(cells[0] or floor)
            shown |= dict.fromkeys(re.findall(r"`(\w+)/?`", cells[1]), floor)
    assert shown == FLOOR_OF
