"""Remove from this Python what a machine without a GPU never loads of PyTorch's CUDA build.

    python trim_torch.py

`libtorch_cuda.so` links to CUDA's libraries, so importing torch needs those; the rest of them, and
Triton, are loaded by work on a GPU alone. What stays is what a training step maps into memory. A
build of PyTorch without CUDA has nothing to remove.
"""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

PACKAGES = Path(sysconfig.get_path("platlib"))
UNUSED = ("triton", "cuda")
LIBRARIES = PACKAGES / "nvidia"

STEP = """
import torch, torchvision
if torch.cuda.is_available():
    raise SystemExit("this machine has a GPU: build with TORCH=cuda")
model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.rand(2, 3, 8, 8)).sum().backward()
optimizer.step()
torch.linalg.svd(torch.rand(4, 4))
torch.fft.rfft2(torch.rand(4, 4))
print(open("/proc/self/maps").read())
"""


def mapped() -> set[Path]:
    """Return the files that a training step on the CPU maps into memory."""
    done = subprocess.run(
        [sys.executable, "-c", STEP], check=True, stdout=subprocess.PIPE, text=True
    )
    return {Path(line.split()[-1]).resolve() for line in done.stdout.splitlines() if "/" in line}


def main() -> None:
    """Remove, and train once more with what is left."""
    for package in UNUSED:
        shutil.rmtree(PACKAGES / package, ignore_errors=True)
    needed = mapped()
    for file in [path for path in LIBRARIES.rglob("*") if path.is_file()]:
        if file.resolve() not in needed:
            file.unlink()
    mapped()


if __name__ == "__main__":
    main()
