"""Packages of the distribution: all below maze_train/, and folders of conf/ as maze_train.conf."""

from setuptools import find_namespace_packages, find_packages, setup

folders = (f"maze_train.conf.{name}" for name in find_namespace_packages("conf"))
setup(packages=[*find_packages(include=["maze_train*"]), "maze_train.conf", *folders])
