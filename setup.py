"""Package layout. The metadata stands in pyproject.toml.

`patches/`, the Megatron wing, lies beside the library in the source tree and is imported as
`megatron_fluid.patches`. A wheel also puts autoload.pth into site-packages, where each start of
Python runs it; it imports the package only if MEGATRON_FLUID_AUTOLOAD asks for it.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

URL = "https://github.com/ORGANISATION/megatron-fluid"  # not known yet: set it before uploading


def described() -> str:
    """README.md for a package index, where relative links and pictures lead nowhere."""
    text = Path(__file__).with_name("README.md").read_text()
    text = re.sub(r"!\[([^]]*)\]\((?!https?:)", rf"![\1]({URL}/raw/main/", text)
    return re.sub(r"(?<!!)\[([^]]*)\]\((?!https?:|#)", rf"[\1]({URL}/blob/main/", text)


class BuildWithAutoload(build_py):
    """build_py, and the .pth file beside the package."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "megatron_fluid.pth")
            self.copy_file("megatron_fluid/autoload.pth", str(target), preserve_mode=False)


setup(
    long_description=described(),
    long_description_content_type="text/markdown",
    project_urls={"Source": URL, "Changelog": f"{URL}/blob/main/CHANGELOG.md"},
    cmdclass={"build_py": BuildWithAutoload},
    packages=[
        *find_packages(include=["megatron_fluid", "megatron_fluid.*"]),
        "megatron_fluid.patches",
        *(f"megatron_fluid.patches.{room}" for room in find_packages("patches")),
    ],
    package_dir={"megatron_fluid": "megatron_fluid", "megatron_fluid.patches": "patches"},
    package_data={
        "megatron_fluid": ["autoload.pth", "py.typed"],
        "megatron_fluid.kernels": ["*/*.cu", "*/*.cuh"],
        "megatron_fluid.plan": ["iterations.json"],
        "megatron_fluid.tensor_parallel": ["measured.json"],
    },
)
