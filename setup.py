"""What pyproject.toml cannot say: the wheel has data_tools and ds_configs inside xscale, and no other package."""

import shutil
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


setup(cmdclass={"build_py": Build})
