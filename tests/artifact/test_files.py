"""Files that are truncated, altered, foreign, of the future or hostile, and writing files."""

import base64
import dataclasses
import io
import json
import os
import resource
import signal
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir

import bucketjit
from bucketjit import BucketedExec
from bucketjit._artifact.archive import member_of
from bucketjit._jax.stablehlo import write_module
from bucketjit.errors import ArtifactError, SpecError
from tests.alone import run_python

MANIFEST = "manifest.json"
SIZES = {"n": [4, 8]}
WEIGHTS = np.random.default_rng(0).standard_normal((3, 3)).astype(np.float32)


def fn(x: Any) -> Any:
    return jax.nn.softmax(x @ WEIGHTS, axis=0)


def save(path: Path, **options: Any) -> None:
    executor = BucketedExec(fn, dynamic_axes="n, _").with_pow2()
    executor.save(path, jax.ShapeDtypeStruct((4, 3), jnp.float32), **{"sizes": SIZES, **options})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a file that is in order."""
    path = tmp_path_factory.mktemp("whole") / "f.bkt"
    save(path)
    return path.read_bytes()


def members(raw: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def written(path: Path, found: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in found.items():
            kind = zipfile.ZIP_STORED if name.startswith("constants/") else zipfile.ZIP_DEFLATED
            archive.writestr(name, data, kind)
    return path


def altered(raw: bytes, path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The file with another manifest, as somebody writes it who knows the format."""
    found = members(raw)
    manifest = json.loads(found[MANIFEST])
    change(manifest)
    return written(path, {**found, MANIFEST: json.dumps(manifest).encode()})


def refused(path: Path, told: str = ".", **options: Any) -> str:
    began = time.monotonic()
    with pytest.raises(ArtifactError, match=told) as raised:
        bucketjit.load(path, **options)
    assert time.monotonic() - began < 5  # it takes far less than a second on an idle machine
    assert str(path) in str(raised.value)
    return str(raised.value)


def test_any_altered_byte_of_a_member_is_found(whole: bytes, tmp_path: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        infos = archive.infolist()
    rng = np.random.default_rng(0)
    for info in infos:
        name, extra = struct.unpack_from("<HH", whole, info.header_offset + 26)
        begin = info.header_offset + 30 + name + extra
        places = rng.integers(0, info.compress_size, 12)
        for place in {0, info.compress_size - 1, *map(int, places)}:
            raw = bytearray(whole)
            raw[begin + place] ^= 1 << int(rng.integers(8))
            path = tmp_path / "f.bkt"
            path.write_bytes(raw)
            try:
                loaded = bucketjit.load(path)
            except ArtifactError as error:
                assert info.filename in str(error)
            else:  # a bit behind the end of compressed data: what the member holds is the same
                assert place == info.compress_size - 1
                np.testing.assert_allclose(loaded(WEIGHTS[:2]), fn(WEIGHTS[:2]), rtol=1e-5)


def test_truncated_files(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "f.bkt"
    for length in (0, 1, 30, 100, len(whole) // 2, len(whole) - 30, len(whole) - 1):
        path.write_bytes(whole[:length])
        refused(path, "truncated|no .bkt file")


def test_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "f.bkt"
    path.write_bytes(b"%PDF-1.7 " + bytes(1000))
    refused(path, "no .bkt file")
    refused(written(path, {"hello.txt": b"hello"}), f"no member {MANIFEST}")
    refused(written(path, {MANIFEST: b"{}"}), "format")
    refused(written(path, {MANIFEST: b"[1, 2"}), "not JSON")
    refused(written(path, {MANIFEST: b"[" * 100_000}), "not JSON")
    with pytest.raises(OSError):
        bucketjit.load(tmp_path / "missing.bkt")
    with pytest.raises(OSError):
        bucketjit.load(tmp_path)


def test_files_of_the_future(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "f.bkt"
    told = refused(altered(whole, path, lambda m: m.update(format=3)), "format 3")
    assert "reads format 2;" in told
    refused(altered(whole, path, lambda m: m.update(calling_convention=99)), "convention 99 of JAX")


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('touch HERE')",
        "n if n else n",
        "[n][0]",
        "n ** 99",
        "2 ** 8 ** 8 ** 8",
        "floordiv((n ** 8 + 1) ** 8, 2) ** 3 - n",
        "9" * 50,
        "n +" * 3000 + "n",
        "print(n)",
        "m + 1",
        "n\n",
        "",
        "1.5 * n",
        "max(n, n, key=print)",
    ],
    ids=lambda text: text[:12],
)
def test_sizes_that_are_no_arithmetic(text: str, whole: bytes, tmp_path: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["functions"][0]["programs"][0]["outputs"][0]["axes"][0] = text

    refused(altered(whole, tmp_path / "f.bkt", change), "no expression of the sizes")

    def guard(manifest: dict[str, Any]) -> None:
        manifest["functions"][0]["programs"][0]["guards"] = [f"{text} >= 1"]

    refused(altered(whole, tmp_path / "f.bkt", guard), MANIFEST)


def computed_size(variable: str, bound: str) -> dict[str, Any]:
    return {"variable": variable, "bound": [bound], "line": "", "is_checked": False}


def test_manifests_that_do_not_fit(whole: bytes, tmp_path: Path) -> None:
    def program(manifest: dict[str, Any]) -> dict[str, Any]:
        return manifest["functions"][0]["programs"][0]

    changes: list[Callable[[dict[str, Any]], Any]] = [
        lambda m: program(m)["buckets"][0]["sizes"].update(n=-4),
        lambda m: program(m)["buckets"][0]["sizes"].update(n=float("nan")),
        lambda m: program(m)["buckets"][0]["sizes"].update(m=4),
        lambda m: program(m)["buckets"][0].update(module="../../etc/passwd"),
        lambda m: program(m)["buckets"][0].update(module=program(m)["buckets"][1]["module"]),
        lambda m: program(m)["buckets"][0]["arguments"][0].append(3),
        lambda m: program(m)["buckets"][0]["arguments"].clear(),
        lambda m: program(m)["buckets"][0]["arguments"].__setitem__(0, [3, 3]),
        lambda m: program(m)["outputs"].append(program(m)["outputs"][0]),
        lambda m: program(m)["outputs"][0].update(dtype="object"),
        lambda m: program(m).update(variables=["lambda"]),
        lambda m: program(m).update(constants=[5]),
        lambda m: program(m).update(buckets=7),
        lambda m: m["functions"][0].update(tree=7),
        lambda m: m["functions"][0]["leaves"].clear(),
        lambda m: m["functions"].clear(),
        lambda m: m.pop("constants"),
        lambda m: m.update(out="html"),
        lambda m: m["members"].pop("constants/0.bin"),
        lambda m: program(m).update(counts=["size_1"]),
        lambda m: program(m).update(presumed=["size_1 >= 1"]),
        lambda m: program(m).pop("computed"),
        lambda m: program(m).update(computed=[computed_size("n", "n")]),
        lambda m: program(m).update(computed=[computed_size("size_1", "size_1")]),
        lambda m: program(m).update(computed=[computed_size("size_1", "print(n)")]),
        lambda m: program(m).update(computed=[computed_size("size_1", "n")], counts=["size_1"]),
    ]
    x = WEIGHTS[:2]
    for number, change in enumerate(changes):
        path = altered(whole, tmp_path / f"{number}.bkt", change)
        with pytest.raises(ArtifactError, match="f?.bkt"):
            bucketjit.load(path)(x)


def test_names_that_lead_out_of_the_archive(whole: bytes, tmp_path: Path) -> None:
    for name in ("../x", "/etc/passwd", "a/../../b", "a\\b", "./x", "a//b"):
        refused(written(tmp_path / "f.bkt", {**members(whole), name: b"x"}), "no name of a member")


def with_module(raw: bytes, path: Path, module: bytes) -> Path:
    """The file with another module for its first bucket, and its digest in the manifest."""
    found = members(raw)
    name = next(name for name in found if "buckets" in name)
    manifest = json.loads(found[MANIFEST])
    member = member_of(module)
    manifest["members"][name] = {"size": member.size, "sha256": member.sha256}
    return written(path, {**found, name: module, MANIFEST: json.dumps(manifest).encode()})


HOSTILE = """
module @jit_main attributes {{mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32}} {{
  func.func public @main(%constant: tensor<3x3xf32>, %sizes: tensor<1xi32>, %x: tensor<4x3xf32>)
      -> tensor<4x3xf32> {{
    %y = {call} : (tensor<4x3xf32>) -> tensor<4x3xf32>
    return %y : tensor<4x3xf32>
  }}
}}
"""


@pytest.mark.parametrize(
    "call",
    [
        'stablehlo.custom_call @xla_ffi_python_cpu_callback(%x) {backend_config = "140"}',
        "stablehlo.custom_call @anything(%x)",
        "stablehlo.custom_call @tpu_custom_call(%x)",
    ],
    ids=["callback", "unknown", "kernel"],
)
def test_modules_that_call_what_is_not_trusted(call: str, whole: bytes, tmp_path: Path) -> None:
    found = members(whole)
    module = jax.export.deserialize(bytearray(found[next(n for n in found if "buckets" in n)]))
    harmless = stablehlo(HOSTILE.format(call="stablehlo.custom_call @Sharding(%x)"))
    fine = dataclasses.replace(module, mlir_module_serialized=harmless).serialize()
    bucketjit.load(with_module(whole, tmp_path / "fine.bkt", bytes(fine)))
    raw = dataclasses.replace(module, mlir_module_serialized=stablehlo(HOSTILE.format(call=call)))
    told = refused(with_module(whole, tmp_path / "f.bkt", bytes(raw.serialize())), "trusted")
    assert call.split("@")[1].split("(")[0] in told


def stablehlo(text: str) -> bytes:
    """The portable artifact of a module that is written as text."""
    with mlir.make_ir_context():
        return write_module(ir.Module.parse(text))


def test_modules_that_are_none(whole: bytes, tmp_path: Path) -> None:
    for raw in (b"", b"x", bytes(1000), b"\x08\x00\x00\x00" * 50, base64.b64encode(bytes(99))):
        refused(with_module(whole, tmp_path / "f.bkt", raw), "buckets")


def test_keys(tmp_path: Path) -> None:
    path = tmp_path / "f.bkt"
    save(path, key="secret")
    x = WEIGHTS[:2]
    np.testing.assert_allclose(bucketjit.load(path, key=b"secret")(x), fn(x), rtol=1e-5)
    np.testing.assert_allclose(bucketjit.load(path)(x), fn(x), rtol=1e-5)
    refused(path, "signature.sig is not of this key", key="other")
    changed = altered(path.read_bytes(), tmp_path / "g.bkt", lambda m: m.update(strategy="?"))
    refused(changed, r"manifest\.json was altered", key="secret")
    save(path)
    refused(path, "not signed", key="secret")
    for key in ("", b"", 7):
        with pytest.raises(SpecError, match="key must be"):
            bucketjit.load(path, key=key)  # type: ignore[arg-type]


def test_constants_are_aligned(whole: bytes) -> None:
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        info = archive.getinfo("constants/0.bin")
    name, extra = struct.unpack_from("<HH", whole, info.header_offset + 26)
    assert (info.header_offset + 30 + name + extra) % 64 == 0
    assert info.compress_type == zipfile.ZIP_STORED


_KILLED = """
import os, signal, sys, threading
import jax, jax.numpy as jnp, numpy as np
import bucketjit
from bucketjit._compile.files import directory as files
weights = np.ones((2000, 2000), np.float32)
executor = bucketjit.BucketedExec(lambda x: x @ weights, dynamic_axes="n, _").with_pow2()
fsync = os.fsync
def killed(handle):
    fsync(handle)
    os.kill(os.getpid(), signal.SIGKILL)
os.fsync = killed
executor.save(sys.argv[1], jax.ShapeDtypeStruct((4, 2000), jnp.float32))
"""


def test_a_killed_save_leaves_the_old_file(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "f.bkt"
    path.write_bytes(whole)
    done = run_python("-c", _KILLED, str(path))
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert path.read_bytes() == whole
    (left,) = {*tmp_path.iterdir()} - {path}
    os.utime(left, (0, 0))  # what is younger may be of a save that is under way
    save(path)
    assert list(tmp_path.iterdir()) == [path]


def test_members_that_are_missing_added_or_double(whole: bytes, tmp_path: Path) -> None:
    found = members(whole)
    path = tmp_path / "f.bkt"
    for name in found:
        rest = {other: data for other, data in found.items() if other != name}
        assert name in refused(written(path, rest))
    refused(written(path, {**found, "more.bin": b"x"}), r"more\.bin is not in manifest\.json")
    written(path, found)
    with pytest.warns(UserWarning), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("constants/0.bin", b"x")
    refused(path, "constants/0.bin is damaged")


def test_a_bomb_takes_no_memory(whole: bytes, tmp_path: Path) -> None:
    found = members(whole)
    module = next(name for name in found if "buckets" in name)
    path = tmp_path / "f.bkt"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    written(path, {**found, module: bytes(100_000_000)})
    manifest = json.loads(found[MANIFEST])
    manifest["members"][module]["size"] = 10_000_000_000
    written(path, {**found, module: b"", MANIFEST: json.dumps(manifest).encode()})
    refused(path, "damaged")
    # The archive itself claims ten gigabytes.
    raw = bytearray(written(path, found).read_bytes())
    at = raw.rfind(module.encode()) - 46
    struct.pack_into("<I", raw, at + 24, 0xFFFFFF00)
    manifest["members"][module]["size"] = 0xFFFFFF00
    path.write_bytes(raw)
    refused(path)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < 600_000  # kilobytes; the first member of this test has 100,000 itself
