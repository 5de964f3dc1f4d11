"""timm imports names from torchvision that its vision transformers never use, and torchvision has no build beside CPU torch.

Where torchvision is missing, `timm()` imports timm with empty classes in place of those names: the transformers are timm's own.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types

import pytest
import torch


class _Named(type):
    """A class of which every attribute is some value of its own."""

    def __getattr__(cls, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Module(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (torch.nn.Module,), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "torchvision" else None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


def timm():
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed (pip install --no-deps timm)")
    missing = importlib.util.find_spec("torchvision") is None
    finder = _Finder()
    if missing:
        sys.meta_path.append(finder)
    try:
        import timm as found
        import timm.models.vision_transformer
    finally:
        if missing:
            sys.meta_path.remove(finder)
            for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
                del sys.modules[name]
    return found
