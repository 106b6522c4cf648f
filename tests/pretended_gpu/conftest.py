"""These tests need a process that has the guard from its start: `python -m tests.pretended_gpu`."""

import os

if not os.environ.get("SEERGATE_PRETENDED_GPU"):
    collect_ignore_glob = ["test_*.py"]
