"""Package layout. The metadata stands in pyproject.toml.

`patches/`, the Megatron wing, lies beside the library in the source tree and is imported as
`megatron_fluid.patches`.
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["megatron_fluid", "megatron_fluid.*"]),
        "megatron_fluid.patches",
        *(f"megatron_fluid.patches.{room}" for room in find_packages("patches")),
    ],
    package_dir={"megatron_fluid": "megatron_fluid", "megatron_fluid.patches": "patches"},
    package_data={
        "megatron_fluid": ["py.typed"],
        "megatron_fluid.kernels": ["*/*.cu", "*/*.cuh"],
        "megatron_fluid.tensor_parallel": ["measured.json"],
    },
)
