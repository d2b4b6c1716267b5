"""What pyproject.toml cannot say: the wheel has data_tools and ds_configs inside xscale, and no other package; links of
README are absolute where PyPI shows it."""

import re
import shutil
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class Build(build_py):
    def finalize_options(self) -> None:
        super().finalize_options()
        if not self.editable_mode:
            self.packages = [name for name in self.packages if not name.startswith("data_tools")]

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for name in ("data_tools", "ds_configs"):
                inside = Path(self.build_lib) / "xscale" / name
                shutil.copytree(name, inside, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))


def absolute_readme() -> str:
    """Return README.md, whose links to files of the repository lead to the repository's address."""
    address = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
    text = Path("README.md").read_text(encoding="utf-8")
    text = re.sub(r"(!\[[^]]*\]\()(?!\w+://)", rf"\1{address}/raw/main/", text)
    return re.sub(r"(\]\()(?!\w+://)", rf"\1{address}/blob/main/", text)


setup(
    cmdclass={"build_py": Build},
    long_description=absolute_readme(),
    long_description_content_type="text/markdown",
)
