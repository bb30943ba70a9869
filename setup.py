"""Packages of the distribution: all below maze_train/, and conf/ as maze_train.conf."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["maze_train*"]), "maze_train.conf"])
