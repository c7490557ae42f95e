"""The notebook of the docs: its stored outputs, and (marked long, needs nbclient and ipykernel) a new execution."""

import json

import pytest

MAX_BYTES = 200_000


def texts(notebook):
    """Return the output texts of each code cell."""
    found = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            shown = [output.get("data", {}).get("text/plain", output.get("text", "")) for output in cell["outputs"]]
            found.append(["".join(text) for text in shown])
    return found


def test_the_notebook_is_small_executed_and_has_no_machine_names(root):
    path = root / "docs" / "notebook.ipynb"
    text = path.read_text()
    assert len(text) < MAX_BYTES
    code = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert not any(output["output_type"] == "error" for cell in code for output in cell["outputs"])
    assert "/home/" not in text
    assert "/tmp/" not in text
    assert "('finished', 2)" in text


@pytest.mark.long
def test_the_notebook_runs_with_the_stored_outputs(root, tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(root / "docs" / "notebook.ipynb", as_version=4)
    before = texts(notebook)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert texts(notebook) == before
