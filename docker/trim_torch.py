"""Run PyTorch's CUDA build on a CPU without CUDA's libraries and GPU code.

    python trim_torch.py requirements >overrides.txt   # after torch is installed alone
    python trim_torch.py trim                          # after its dependencies are installed

`import torch` loads `libtorch_cuda.so`, which links to cuBLAS, cuDNN, NCCL and others: gigabytes
that a machine without a GPU loads and never calls. ``requirements`` prints the overrides that keep
them from being installed; only CUDA's runtime and its profiling interface stay, which importing
torch calls. ``trim`` writes a stub of every library that is missing: the same name, the same
symbols with the same versions, and each function returns 1, an error in all of these libraries. It
also cuts the GPU machine code (`.nv_fatbin`, 332 MB of torch 2.14) out of `libtorch_cuda.so`, and
removes headers and executables. A build of PyTorch without CUDA has nothing to trim.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

PACKAGES = Path(sysconfig.get_path("platlib"))
GPU = re.compile(r"nvidia-|triton|cuda-")
"""Dependencies that only work on a GPU calls."""

KEPT = re.compile(r"nvidia-cuda-(runtime|cupti)|cuda-toolkit")
EXTRAS = ("cudart", "cupti")
"""What stays of ``cuda-toolkit``, which names CUDA's libraries as extras."""

UNUSED = (
    "triton",
    "cuda",
    "torch/include",
    "torch/lib/libcaffe2_nvrtc.so",
    "torch/lib/libtorch_cuda_linalg.so",
)
ROOTS = (
    "libtorch_python.so",
    "libtorch_global_deps.so",
    "_C_stable.so",
    "image_stable.so",
    "_C.so",
    "image.so",
)
"""Libraries that Python loads; the others are loaded because these link to them."""

PAGE = 0x1000
LOAD, DYNAMIC = 1, 2
MACHINES = {
    62: bytes.fromhex("b801000000c3"),  # x86-64: mov eax, 1; ret
    183: bytes.fromhex("20008052c0035fd6"),  # AArch64: mov w0, 1; ret
}

CHECK = """
import torch, torchvision
assert not torch.cuda.is_available()
nn = torch.nn
layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2)
model = nn.Sequential(*layers)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
loss = torch.nn.functional.cross_entropy(model(torch.rand(2, 3, 8, 8)), torch.tensor([0, 1]))
torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
loss.backward()
optimizer.step()
torch.linalg.svd(torch.rand(4, 4))
torch.fft.rfft2(torch.rand(4, 4))
torch.sparse.mm(torch.eye(4).to_sparse(), torch.rand(4, 4))
torchvision.ops.nms(torch.rand(3, 4), torch.rand(3), 0.5)
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
    torch.rand(8, 8) @ torch.rand(8, 8)
"""


def requirements() -> None:
    """Print overrides for the installer: what it leaves out of torch's dependencies."""
    for wanted in importlib.metadata.requires("torch") or []:
        name, extras = re.match(r"([\w.-]+)(?:\[(.*?)\])?", wanted).groups()  # type: ignore[union-attr]
        if not GPU.match(name):
            continue
        if not KEPT.match(name):
            print(f'{name}; python_version < "3"')  # noqa: T201
        elif extras:
            kept = ",".join(extra for extra in extras.split(",") if extra in EXTRAS)
            print(wanted.replace(f"[{extras}]", f"[{kept}]" if kept else "", 1))  # noqa: T201


@dataclass
class Library:
    """The dynamic section of a 64-bit little-endian ELF file.

    Attributes
    ----------
    machine
        ELF's number of the processor.
    needed
        Names of the libraries that it links to.
    defined, undefined
        Its symbols; an undefined one with the library and version that it is bound to, if any.
    """

    machine: int = 0
    needed: list[str] = field(default_factory=list)
    defined: set[str] = field(default_factory=set)
    undefined: dict[str, tuple[str, str] | None] = field(default_factory=dict)


def read(path: Path) -> Library:
    """Read a shared library's names, symbols and symbol versions."""
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        return Library()
    found = Library(machine=struct.unpack_from("<H", data, 18)[0])
    segments = _segments(data)

    def place(address: int) -> int:
        for _, kind, _, offset, start, size, _ in segments:
            if kind == LOAD and start <= address < start + size:
                return offset + address - start
        raise ValueError(f"{path}: {address:#x} is in no segment")

    (at,) = (offset for _, kind, _, offset, *_ in segments if kind == DYNAMIC)
    entries: dict[int, int] = {}
    names = []
    while (entry := struct.unpack_from("<QQ", data, at))[0]:
        if entry[0] == 1:
            names.append(entry[1])
        entries[entry[0]] = entry[1]
        at += 16
    strings = place(entries[5])

    def text(offset: int) -> str:
        return data[strings + offset : data.index(b"\0", strings + offset)].decode()

    found.needed = [text(name) for name in names]
    versions = (
        _needed_versions(data, place(entries[0x6FFFFFFE]), text) if 0x6FFFFFFE in entries else {}
    )
    symbols, table = place(entries[6]), entries.get(0x6FFFFFF0)
    for number in range(1, _symbol_count(data, entries, place)):
        name, info, _, section, _, _ = struct.unpack_from("<IBBHQQ", data, symbols + 24 * number)
        if info >> 4 == 0:
            continue
        if section:
            found.defined.add(text(name))
        elif info >> 4 == 1:
            index = struct.unpack_from("<H", data, place(table) + 2 * number)[0] if table else 0
            found.undefined[text(name)] = versions.get(index & 0x7FFF)
    return found


def _segments(data: bytes) -> list[tuple[int, ...]]:
    """Return number, kind, flags, offset, address and both sizes (file, memory) by segment."""
    start, size, count = (
        struct.unpack_from("<Q", data, 32)[0],
        *struct.unpack_from("<HH", data, 54),
    )
    found = []
    for number in range(count):
        kind, flags, offset, address, _, stored, mapped, _ = struct.unpack_from(
            "<IIQQQQQQ", data, start + number * size
        )
        found.append((number, kind, flags, offset, address, stored, mapped))
    return found


def _symbol_count(data: bytes, entries: dict[int, int], place) -> int:  # type: ignore[no-untyped-def]
    """Return the number of dynamic symbols, which only the hash tables hold."""
    if 4 in entries:
        return int(struct.unpack_from("<I", data, place(entries[4]) + 4)[0])
    at = place(entries[0x6FFFFEF5])
    buckets, first, words, _ = struct.unpack_from("<IIII", data, at)
    at += 16 + 8 * words
    last = max(struct.unpack_from(f"<{buckets}I", data, at), default=0)
    if last < first:
        return int(first)
    chain = at + 4 * buckets
    while not struct.unpack_from("<I", data, chain + 4 * (last - first))[0] & 1:
        last += 1
    return int(last) + 1


def _needed_versions(data: bytes, at: int, text) -> dict[int, tuple[str, str]]:  # type: ignore[no-untyped-def]
    """Return library and version by index."""
    found = {}
    while True:
        _, count, file, first, following = struct.unpack_from("<HHIII", data, at)
        entry = at + first
        for _ in range(count):
            _, _, index, name, step = struct.unpack_from("<IHHII", data, entry)
            found[index] = (text(file), text(name))
            entry += step
        if not following:
            return found
        at += following


def _hash(name: str) -> int:
    """Return the System V ABI's hash of a symbol."""
    value = 0
    for byte in name.encode():
        value = (value << 4) + byte
        high = value & 0xF0000000
        value = (value ^ (high >> 24)) & ~high & 0xFFFFFFFF
    return value


def stub(name: str, symbols: dict[str, str | None], machine: int) -> bytes:
    """Return a shared library of this name whose functions all return 1.

    Parameters
    ----------
    symbols
        Names of the functions, each with its version; None for one without.
    machine
        ELF's number of the processor, one of `MACHINES`.
    """
    strings = bytearray(b"\0")
    offsets: dict[str, int] = {}

    def string(text: str) -> int:
        if text not in offsets:
            offsets[text] = len(strings)
            strings.extend(text.encode() + b"\0")
        return offsets[text]

    # Version 1 stands for the library, and is that of symbols without one.
    versions = [name, *sorted({version for version in symbols.values() if version})]
    table = bytearray()
    for index, version in enumerate(versions, 1):
        last = index == len(versions)
        table += struct.pack(
            "<HHHHIII", 1, index == 1, index, 1, _hash(version), 20, 0 if last else 28
        )
        table += struct.pack("<II", string(version), 0)
    names = sorted(symbols)
    size = 24 * (len(names) + 1)
    buckets = max(1, len(names))
    chains: list[list[int]] = [[] for _ in range(buckets)]
    for number, symbol in enumerate(names, 1):
        string(symbol)
        chains[_hash(symbol) % buckets].append(number)
    heads, following = [0] * buckets, [0] * (len(names) + 1)
    for bucket, members in enumerate(chains):
        for number, after in zip([0, *members], [*members, 0], strict=True):
            if number == 0:
                heads[bucket] = after
            else:
                following[number] = after
    hashes = struct.pack(
        f"<II{buckets}I{len(following)}I", buckets, len(following), *heads, *following
    )
    indices = struct.pack(
        f"<{len(names) + 1}H",
        0,
        *(
            versions.index(version, 1) + 1 if (version := symbols[symbol]) else 1
            for symbol in names
        ),
    )
    string(name)

    parts: dict[str, int] = {}
    body = bytearray(64 + 4 * 56)

    def add(part: str, content: bytes) -> None:
        body.extend(b"\0" * (-len(body) % 16))
        parts[part] = len(body)
        body.extend(content)

    add("hash", hashes)
    add("symbols", b"\0" * size)
    add("strings", bytes(strings))
    add("indices", indices)
    add("versions", bytes(table))
    add("code", MACHINES[machine])
    for number, symbol in enumerate(names, 1):
        struct.pack_into(
            "<IBBHQQ", body, parts["symbols"] + 24 * number,
            offsets[symbol], 0x12, 0, 1, parts["code"], len(MACHINES[machine]),
        )  # fmt: skip
    read_only = len(body)
    body.extend(b"\0" * (-len(body) % 0x10000))
    dynamic = len(body)
    for tag, value in (
        (14, offsets[name]),
        (4, parts["hash"]),
        (5, parts["strings"]),
        (6, parts["symbols"]),
        (10, len(strings)),
        (11, 24),
        (0x6FFFFFF0, parts["indices"]),
        (0x6FFFFFFC, parts["versions"]),
        (0x6FFFFFFD, len(versions)),
        (0, 0),
    ):
        body += struct.pack("<QQ", tag, value)
    used = len(body) - dynamic
    struct.pack_into(
        "<16sHHIQQQIHHHHHH", body, 0, b"\x7fELF\x02\x01\x01" + b"\0" * 9,
        3, machine, 1, 0, 64, 0, 0, 64, 56, 4, 64, 0, 0,
    )  # fmt: skip
    for number, (kind, flags, offset, length, align) in enumerate(
        (
            (LOAD, 5, 0, read_only, 0x10000),
            (LOAD, 6, dynamic, used, 0x10000),
            (DYNAMIC, 6, dynamic, used, 8),
            (0x6474E551, 6, 0, 0, 16),
        )
    ):
        struct.pack_into(
            "<IIQQQQQQ", body, 64 + 56 * number,
            kind, flags, offset, offset, offset, length, length, align,
        )  # fmt: skip
    return bytes(body)


def cut(path: Path, section: str) -> int:
    """Replace a read-only section by memory full of zeros; return the bytes that the file lost.

    Whole pages only. The file keeps no section headers, which only debuggers read.
    """
    data = path.read_bytes()
    found = _section(data, section)
    if found is None:
        return 0
    address, offset, size = found
    first, last = -(-address // PAGE) * PAGE, (address + size) // PAGE * PAGE
    shift = last - first
    segments = _segments(data)
    (holder,) = (
        s for s in segments if s[1] == LOAD and s[4] <= address and address + size <= s[4] + s[5]
    )
    start, entry, count = (
        struct.unpack_from("<Q", data, 32)[0],
        *struct.unpack_from("<HH", data, 54),
    )
    headers = []
    for number in range(count):
        header = list(struct.unpack_from("<IIQQQQQQ", data, start + number * entry))
        if number == holder[0]:
            head = first - header[3]
            tail = last - header[3]
            headers.append([*header[:5], head, tail, header[7]])
            headers.append(
                [*header[:2], header[2] + tail - shift, header[3] + tail, header[4] + tail,
                 header[5] - tail, header[6] - tail, header[7]]
            )  # fmt: skip
        elif header[0] != 4:  # the note, whose place the new segment takes
            if header[2] > offset:
                header[2] -= shift
            headers.append(header)
    if len(headers) != count or shift <= 0:
        return 0
    cut_at = offset + first - address
    kept = bytearray(data[:cut_at] + data[cut_at + shift :])
    for number, header in enumerate(headers):
        struct.pack_into("<IIQQQQQQ", kept, start + number * entry, *header)
    struct.pack_into("<Q", kept, 40, 0)
    struct.pack_into("<HH", kept, 60, 0, 0)
    path.write_bytes(kept)
    return shift


def _section(data: bytes, wanted: str) -> tuple[int, int, int] | None:
    """Return address, offset and size of a section by its name; None if there is none."""
    start, (size, count, names) = (
        struct.unpack_from("<Q", data, 40)[0],
        struct.unpack_from("<HHH", data, 58),
    )
    if not start or not count:
        return None
    headers = [struct.unpack_from("<IIQQQQ", data, start + i * size) for i in range(count)]
    strings = headers[names][4]
    for name, _, _, address, offset, length in headers:
        end = data.index(b"\0", strings + name)
        if data[strings + name : end].decode() == wanted:
            return address, offset, length
    return None


def trim() -> None:
    """Trim the installed torch, and check that it still trains."""
    own = PACKAGES / "torch" / "lib"
    if (own / "libtorch_cuda.so").is_file():
        for name in UNUSED:
            path = PACKAGES / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        for path in (PACKAGES / "torch" / "bin").iterdir():
            if path.name != "torch_shm_manager":  # shares tensors between processes
                path.unlink()
        _write_stubs(own)
        saved = cut(own / "libtorch_cuda.so", ".nv_fatbin")
        print(f"trim_torch: cut {saved / 1e6:.0f} MB of GPU code")  # noqa: T201
    subprocess.run([sys.executable, "-c", CHECK], check=True)


def _write_stubs(own: Path) -> None:
    """Write a stub of each library that torch links to and that is not installed."""
    folders = (own, PACKAGES / "torchvision", PACKAGES / "torchvision.libs", PACKAGES / "nvidia")
    files = {path.name: path for folder in folders for path in folder.rglob("*.so*")}
    loaded: dict[str, Library] = {}
    waiting = [name for name in ROOTS if name in files]
    missing = set()
    while waiting:
        name = waiting.pop()
        if name in loaded:
            continue
        if name in files:
            loaded[name] = read(files[name])
            waiting += loaded[name].needed
        elif not _is_system(name):
            missing.add(name)
    defined = set().union(*(library.defined for library in loaded.values()))
    loose: dict[str, str | None] = {}
    bound: dict[str, dict[str, str | None]] = {name: {} for name in missing}
    for library in loaded.values():
        for symbol, version in library.undefined.items():
            if version is None and symbol not in defined:
                loose[symbol] = None
            elif version is not None and version[0] in missing:
                bound[version[0]][symbol] = version[1]
    machine = loaded["libtorch_python.so"].machine
    for number, name in enumerate(sorted(missing)):
        # The loader looks a symbol without a version up in every library.
        (own / name).write_bytes(stub(name, bound[name] | (loose if number == 0 else {}), machine))
    print(f"trim_torch: wrote stubs of {', '.join(sorted(missing)) or 'nothing'}")  # noqa: T201


def _is_system(name: str) -> bool:
    """Return whether the C or C++ run time of the machine has a library."""
    return (
        re.match(r"lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+|gomp|util)\.so|ld-linux", name) is not None
    )


if __name__ == "__main__":
    {"requirements": requirements, "trim": trim}[sys.argv[1]]()
