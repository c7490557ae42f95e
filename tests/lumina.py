"""Build the tiny pipeline of docs/own_model.md with the code of that page. wfm_ds does not ship its family."""

from pages import code

_module = {"__name__": "tiny_lumina"}
exec(code("own_model.md", "tiny_lumina.py"), _module)
tiny_lumina = _module["tiny"]
