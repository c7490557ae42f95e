"""A tiny pipeline of a family that wfm_ds does not ship: that of docs/models.md, by the page's own code."""

from pages import code

_module = {"__name__": "tiny_lumina"}
exec(code("models.md", "tiny_lumina.py"), _module)
tiny_lumina = _module["tiny"]
