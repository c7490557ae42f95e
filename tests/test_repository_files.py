"""Constraints, workflows and hooks name existing files, and the two constraint files pin matching versions."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
CONSTRAINTS = ("constraints.txt", "constraints-3.12.txt")
# Python 3.12 is tested with older versions of these. The older transformers needs an older huggingface_hub.
OTHER_VERSIONS = {"torch", "triton", "transformers", "huggingface-hub"}
# The two versions of huggingface_hub need different ones of these.
HTTP_CLIENTS = {"httpx", "httpcore", "httpx2", "httpcore2", "truststore"}
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read_pins(name):
    """Return {canonical name: version} of a constraints file."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    pins = {canonicalize_name(package): version for package, version in (line.split("==") for line in lines)}
    assert len(pins) == len(lines), f"{name} pins a package twice"
    return pins


def test_both_constraint_files_pin_the_same_versions_except_the_torch_stack():
    default, python312 = map(read_pins, CONSTRAINTS)
    different = {name for name in default.keys() | python312.keys() if default.get(name) != python312.get(name)}
    assert different - HTTP_CLIENTS == OTHER_VERSIONS


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_all_dependencies_of_the_dev_extra_are_pinned_to_allowed_versions(name):
    pins = read_pins(name)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = list(map(Requirement, project["dependencies"] + project["optional-dependencies"]["dev"]))
    assert len(requirements) > 30
    wrong = [
        str(requirement)
        for requirement in requirements
        if not requirement.specifier.contains(pins.get(canonicalize_name(requirement.name), "0"), prereleases=True)
    ]
    assert wrong == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_read_only_and_have_time_limits(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["group"]
    assert all(job["timeout-minutes"] <= 300 for job in workflow["jobs"].values())


def test_workflows_and_hooks_name_existing_files():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    texts = [hook.get("entry", "") for repo in hooks["repos"] for hook in repo["hooks"]]
    texts += [path.read_text() for path in WORKFLOWS]
    names = {
        name
        for text in texts
        for name in re.findall(r"constraints[\w.-]*\.txt|tests/\w+\.py|\.ci/run|pyproject\.toml", text)
    }
    assert len(names) == 6
    assert [name for name in sorted(names) if not (ROOT / name).is_file()] == []


def test_pages_name_the_data_formats_and_the_other_projects():
    readme, compare = (ROOT / "README.md").read_text(), (ROOT / "docs" / "compare.md").read_text()
    data = ("caption tables", "Hugging Face datasets", "WebDataset", "LeRobot", "LLaVA")
    assert [name for name in data if name not in readme] == []
    others = ("cosmos-framework", "UniRL", "diffusion-pipe", "miles_diffusion", "FastVideo", "RLinf", "DiffusionART")
    assert [name for name in others if name not in compare] == []
