"""Stubs of missing libraries, and a library without its GPU code; no engine."""

import ctypes
import platform
import struct
from pathlib import Path

import pytest
from image_parts import TRIM

MACHINE = {"x86_64": 62, "aarch64": 183}.get(platform.machine(), 0)
pytestmark = pytest.mark.skipif(MACHINE == 0, reason="stubs are of x86-64 and AArch64")
NAME = "libcublas.so.13"
SYMBOLS = {"cublasCreate_v2": NAME, "cublasSgemm": "libcublas.so.13.1", "ncclInit": None}


def test_a_stub_defines_each_symbol_with_its_version_and_returns_an_error(tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.write_bytes(TRIM.stub(NAME, SYMBOLS, MACHINE))
    loaded = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    assert [getattr(loaded, symbol)(1, 2) for symbol in SYMBOLS] == [1, 1, 1]
    dlvsym = ctypes.CDLL(None).dlvsym
    dlvsym.restype = ctypes.c_void_p
    dlvsym.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]

    def found(symbol: str, version: str) -> bool:
        return dlvsym(loaded._handle, symbol.encode(), version.encode()) is not None

    assert found("cublasCreate_v2", NAME) and found("cublasSgemm", "libcublas.so.13.1")
    assert not found("cublasCreate_v2", "libcublas.so.13.1")
    with pytest.raises(AttributeError):
        loaded.cublasDestroy_v2  # noqa: B018


def test_a_stub_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.write_bytes(TRIM.stub(NAME, SYMBOLS, MACHINE))
    library = TRIM.read(path)
    assert library.machine == MACHINE and library.defined == set(SYMBOLS)
    assert library.needed == [] and library.undefined == {}


def test_names_and_versions_that_a_library_needs_are_read() -> None:
    import torch

    library = TRIM.read(Path(torch.__file__).parent / "lib" / "libtorch_python.so")
    assert "libtorch_cpu.so" in library.needed
    file, version = library.undefined["malloc"]
    assert file == "libc.so.6" and version.startswith("GLIBC_")
    assert "PyModule_Create2" in library.undefined and len(library.defined) > 1000


SIZE = 5 * 0x1000
BEGIN = 0x30000


def with_section() -> bytes:
    """Return a stub with a note and a segment: a page, five pages of GPU code, a word."""
    plain = TRIM.stub(NAME, SYMBOLS, MACHINE)
    headers = bytearray(plain[64 : 64 + 4 * 56])
    headers += struct.pack("<IIQQQQQQ", 4, 4, 64, 64, 64, 0, 0, 8)
    content = b"r" * 0x1000 + b"g" * SIZE + b"after"
    stored = len(content)
    headers += struct.pack("<IIQQQQQQ", 1, 4, BEGIN, BEGIN, BEGIN, stored, stored, 0x1000)
    at = len(plain) + -len(plain) % 8
    whole = bytearray(plain.ljust(at, b"\0") + headers).ljust(BEGIN, b"\0") + content
    names = b"\0.nv_fatbin\0"
    begin = BEGIN + 0x1000
    sections = struct.pack("<IIQQQQIIQQ", 1, 1, 2, begin, begin, SIZE, 0, 0, 1, 0)
    sections += struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, len(whole), len(names), 0, 0, 1, 0)
    whole += names
    struct.pack_into("<QQ", whole, 32, at, len(whole))
    struct.pack_into("<HHHHH", whole, 54, 56, 6, 64, 2, 1)
    return bytes(whole + sections)


def test_a_cut_section_reads_as_zeros_and_what_is_around_it_is_kept(tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.write_bytes(with_section())
    before = path.stat().st_size
    assert TRIM.cut(path, ".nv_fatbin") == SIZE
    assert path.stat().st_size == before - SIZE
    assert TRIM.cut(path, ".nv_fatbin") == 0  # it keeps no section headers
    loaded = ctypes.CDLL(str(path))
    assert loaded.cublasSgemm() == 1
    address = ctypes.cast(loaded.cublasSgemm, ctypes.c_void_p).value
    assert address is not None
    base = address - with_section().index(TRIM.MACHINES[MACHINE])
    kept = ctypes.string_at(base + BEGIN, 0x1000 + SIZE + 5)
    assert kept == b"r" * 0x1000 + b"\0" * SIZE + b"after"


def test_a_library_without_gpu_code_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.write_bytes(TRIM.stub(NAME, SYMBOLS, MACHINE))
    assert TRIM.cut(path, ".nv_fatbin") == 0
    assert path.read_bytes() == TRIM.stub(NAME, SYMBOLS, MACHINE)


def test_the_overrides_leave_out_what_a_gpu_needs_and_keep_cuda_s_run_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [
        "numpy",
        'cuda-toolkit[cublas,cudart,cupti]==13.0.3; platform_system == "Linux"',
        'nvidia-cuda-runtime-cu12==12.8; platform_system == "Linux"',
        'nvidia-cudnn-cu13==9.24; platform_system == "Linux"',
        "triton~=3.8.0",
    ]
    monkeypatch.setattr(TRIM.importlib.metadata, "requires", lambda name: wanted)
    TRIM.requirements()
    assert capsys.readouterr().out.splitlines() == [
        'cuda-toolkit[cudart,cupti]==13.0.3; platform_system == "Linux"',
        'nvidia-cudnn-cu13; python_version < "3"',
        'triton; python_version < "3"',
    ]
