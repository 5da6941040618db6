"""Builds the kernel, nothing else: every other setting is in pyproject.toml.

Each extension is optional: where there is no compiler the package installs all the same and
penstock.kernel says what is missing.
"""

import sys
from pathlib import Path

from setuptools import Extension, setup

FLAGS = [] if sys.platform == "win32" else ["-O3", "-fno-strict-aliasing", "-Wno-unreachable-code"]
CONCERNS = sorted(Path("src/penstock/kernel").glob("*.pyx"))


def extensions() -> list[Extension]:
    """Return one optional extension per concern, or none where Cython is absent."""
    try:
        from Cython.Build import cythonize
    except ImportError:
        return []
    modules = [
        Extension(
            f"penstock.kernel.{concern.stem}",
            [str(concern)],
            extra_compile_args=FLAGS,
            optional=True,
        )
        for concern in CONCERNS
    ]
    cythonized: list[Extension] = cythonize(
        modules, build_dir="build/cython", compiler_directives={"language_level": 3}
    )
    for module in cythonized:  # cythonize does not carry the flag over
        module.optional = True
    return cythonized


setup(ext_modules=extensions())
