"""Make an installed SGLang start without a GPU; run by its own interpreter, once, when its environment is made.

SGLang always imports CUDA kernels; with `--device cpu --attention-backend torch_native` it calls none. So this writes
a package `sgl_kernel` in which everything can be imported and nothing called. SGLang also imports torchvision, which
registers operators that PyTorch's build for CPUs does not have: that module is emptied.

    <engine's python> -c "$(cat sglang_on_cpu.py)"
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

NO_KERNELS = '''"""Stands for CUDA kernels: everything can be imported, and nothing called."""

import importlib.abc
import importlib.machinery
import sys
import types


def _part_of(whole, name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Kernel(f"{whole.__name__}.{name}")


class _Kernel:
    __getattr__ = _part_of

    def __init__(self, name):
        self.__name__ = name

    def __call__(self, *_args, **_kwargs):
        raise RuntimeError(f"{self.__name__} needs a GPU")


class _Kernels(types.ModuleType):
    __getattr__ = _part_of


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith(f"{__name__}.") else None

    def create_module(self, spec):
        return _Kernels(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(_Finder())
sys.modules[__name__].__class__ = _Kernels
'''


def main() -> None:
    """Change the current environment."""
    packages = Path(sysconfig.get_path("purelib"))
    (packages / "sgl_kernel").mkdir(exist_ok=True)
    (packages / "sgl_kernel" / "__init__.py").write_text(NO_KERNELS)
    (packages / "torchvision" / "_meta_registrations.py").write_text("")


if __name__ == "__main__":
    main()
