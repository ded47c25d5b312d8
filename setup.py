from setuptools import setup

setup()  # all metadata stand in pyproject.toml
