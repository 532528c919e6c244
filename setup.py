"""Builds the extensions. MTPSTATS_DEBUG=1 brings Cython's bounds and overflow checks back."""

import os

from Cython.Build import cythonize
from setuptools import Extension, setup

flags = ["-O3", "-ffp-contract=off"]
debug = os.environ.get("MTPSTATS_DEBUG", "0") == "1"

setup(
    ext_modules=cythonize(
        # No -ffast-math: it deletes the NaN behaviour of the kernel. No -march=native: wider
        # instructions come from runtime dispatch. No contraction: every machine, the same bits.
        [
            Extension(
                "mtpstats._core",
                ["mtpstats/_core.pyx"],
                depends=[
                    "mtpstats/_counters.pxi",
                    "mtpstats/_kernel.h",
                    "mtpstats/_kernel_simd.h",
                    "mtpstats/_sampler.h",
                    "mtpstats/_stop.h",
                ],
                extra_compile_args=flags,
            ),
            Extension("mtpstats._beams", ["mtpstats/_beams.pyx"], extra_compile_args=flags),
            Extension(
                "mtpstats._replay",
                ["mtpstats/_replay.pyx"],
                depends=[
                    "mtpstats/_grown.pxi",
                    "mtpstats/_paths.pxi",
                    "mtpstats/_verify.pxi",
                    "mtpstats/_walk.pxi",
                ],
                extra_compile_args=flags,
            ),
        ],
        compiler_directives={
            "language_level": 3,
            "boundscheck": debug,
            "wraparound": debug,
            "initializedcheck": debug,
            "overflowcheck": debug,
            "cdivision": not debug,
            "embedsignature": True,
        },
    )
)
