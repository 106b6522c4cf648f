"""Compile the device guard, into the cache of PyTorch's extension loader, and run the tests beside it."""

import os
import sys
from pathlib import Path

from torch.utils.cpp_extension import TORCH_LIB_PATH, load

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Become a pytest that has the guard from its start."""
    flags = [f"-Wl,-rpath,{TORCH_LIB_PATH}"]
    guard = load("seergate_pretended_gpu", [str(HERE / "guard.cpp")], extra_ldflags=flags, is_python_module=False)
    os.environ |= {"LD_PRELOAD": str(guard), "SEERGATE_PRETENDED_GPU": "1", "SEERGATE_BACKEND": "torch"}
    os.execv(sys.executable, [sys.executable, "-m", "pytest", str(HERE), "-p", "no:cacheprovider", *sys.argv[1:]])


if __name__ == "__main__":
    main()
