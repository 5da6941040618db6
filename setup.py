"""Builds the kernel, nothing else: every other setting is in pyproject.toml.

Each extension is optional: where there is no compiler the package installs all the same and
penstock.kernel says what is missing.  They are translated and compiled on all cores.
"""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FLAGS = [] if sys.platform == "win32" else ["-O3", "-fno-strict-aliasing", "-Wno-unreachable-code"]
CONCERNS = sorted(Path("src/penstock/kernel").glob("*.pyx"))
CORES = (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()) or 1


class BuildKernel(build_ext):
    """Compiles side by side, and says so: a minute without a word looks like a hang."""

    def finalize_options(self) -> None:
        """Use every core unless told otherwise."""
        super().finalize_options()
        self.parallel = self.parallel or CORES

    def run(self) -> None:
        """Say what is done before it is done."""
        sys.stderr.write(f"penstock: compiling {len(self.extensions)} parts of the kernel on {self.parallel} cores\n")
        super().run()


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
        modules, build_dir="build/cython", compiler_directives={"language_level": 3}, nthreads=CORES, quiet=True
    )
    for module in cythonized:  # cythonize does not carry the flag over
        module.optional = True
    return cythonized


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildKernel})
