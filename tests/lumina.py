"""The tiny pipeline of docs/own_model.md, whose family wfm_ds does not ship, built by the code of that page."""

from pages import code

_module = {"__name__": "tiny_lumina"}
exec(code("own_model.md", "tiny_lumina.py"), _module)
tiny_lumina = _module["tiny"]
