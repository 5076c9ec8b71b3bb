"""Find the packages of both folders; setup.cfg has the rest, and its `find:` takes one folder."""

from setuptools import find_packages, setup

setup(
    packages=find_packages(include=["mpikfac", "mpikfac.*"]) + find_packages("apps"),
    package_dir={"mpikfac_apps": "apps/mpikfac_apps"},
)
