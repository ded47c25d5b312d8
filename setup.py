import sys

from setuptools import find_packages, setup

# All other metadata stand in pyproject.toml. hetseq/tasks and hetseq/preprocessing are links, and folders in a wheel.
# An editable install is a checkout: there `import tasks` and `python -m hetseq.preprocessing.NAME` work as well.
short_names = ["tasks*", "preprocessing*"] if "editable_wheel" in sys.argv else []
setup(packages=find_packages(include=["hetseq*", *short_names]))
