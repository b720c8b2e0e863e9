"""Packages of the distribution; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

# conf/ and tasks/ stay at the top of the tree and are installed as packages of evalkit.
setup(
    packages=[
        *find_packages(include=["evalkit", "evalkit.*"]),
        *find_packages("kernels"),
        "evalkit.conf",
        "evalkit.tasks",
    ]
)
