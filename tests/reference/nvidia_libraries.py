#!/usr/bin/env python3
"""Prints the folders of NVIDIA's libraries in this Python's packages, for LD_LIBRARY_PATH: nvidia_libraries.py

pip installs them next to torch (nvidia/*/lib) or inside it (torch/lib): for all users, for one user or in a virtual
environment. conda installs them in its lib folder. The script does not import torch, which would take seconds.
"""
import importlib.util
import sys
from pathlib import Path

# cuDNN loads NVRTC and CUDA's runtime library, which have folders of their own among the packages for CUDA 12.
NAMES = [
    "libcublas.so*", "libcublasLt.so*", "libcurand.so*", "libcudnn.so*", "libnccl.so*", "libnvrtc.so*", "libcudart.so*",
]


def locations(package: str) -> list[Path]:
    found = importlib.util.find_spec(package)
    return [Path(folder) for folder in (found.submodule_search_locations or [])] if found else []


def candidates() -> list[Path]:
    of_nvidia = [folder for root in locations("nvidia") for folder in sorted(root.glob("*/lib"))]
    within = [root / "lib" for root in locations("torch")]
    prefixes = dict.fromkeys([sys.prefix, sys.base_prefix])
    of_conda = [Path(prefix, *lib) for prefix in prefixes for lib in [("lib",), ("targets", "x86_64-linux", "lib")]]
    return [*of_nvidia, *within, *of_conda]


def folders() -> list[str]:
    has_one = lambda folder: any(any(folder.glob(name)) for name in NAMES)
    return list(dict.fromkeys(str(folder) for folder in candidates() if has_one(folder)))


if __name__ == "__main__":
    print(":".join(folders()))
