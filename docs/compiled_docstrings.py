"""A griffe extension: the stub says the types of the compiled module, the module itself holds the docstrings."""

import importlib
import inspect
from functools import reduce

import griffe

MODULE = "lkv._storage"


class CompiledDocstrings(griffe.Extension):
    """Gives each object of the stub the docstring of its namesake in the compiled module."""

    def on_object(self, *, obj, loader, **kwargs):
        """Called for every object of a package once the package is loaded."""
        if obj.is_alias or obj.docstring is not None or not obj.path.startswith(f"{MODULE}."):
            return
        names = obj.path.removeprefix(f"{MODULE}.").split(".")
        try:
            found = reduce(inspect.getattr_static, names, importlib.import_module(MODULE))
        except AttributeError:
            return
        text = inspect.getdoc(found)
        if text and type(found) not in (int, str, bytes, tuple, dict, list):
            obj.docstring = griffe.Docstring(text, parent=obj, parser=loader.docstring_parser)
