"""Builds the library; what else there is to say about the package is in pyproject.toml."""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

setup(
    ext_modules=[
        CppExtension(
            "torch_abacus._library",
            sorted(str(f) for f in Path("csrc").glob("*.cpp")),
            extra_compile_args=["-O1", "-g0", "-fvisibility=hidden"],
        )
    ],
    cmdclass={"build_ext": BuildExtension.with_options(no_python_abi_suffix=True)},
)
