"""One rank's run: load, build, act after each step, save, resume, regroup, evaluate."""
