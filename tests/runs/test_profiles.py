"""Parity: files equal those of the safetensors package. Identity: joined parts equal one whole file."""

import hashlib
import json
import random

import pytest
import safetensors.torch
import torch

from wherewhat.errors import MeasureError, StoreError
from wherewhat.files import canonical_json
from wherewhat.runs.schema import (
    SCHEMA_VERSION,
    VERSION_KEY,
    ProfileFile,
    join_curves,
    profile_name,
    stored_curves,
    write_profiles,
)
from wherewhat.scores import MODEL, Column


def join_profiles(path, sources):
    write_profiles(path, join_curves(stored_curves(ProfileFile(source)) for source in sources))


def many_profiles():
    torch.manual_seed(0)
    shapes = [(), (1,), (3, 5), (0, 4), (2, 3, 7)]
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    dtypes += [torch.bool, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
    names = [profile_name(d, layer, "c") for d in ("Émile", 'a/"b\\\n\x01\x7f', None) for layer in (MODEL, 0, 2, 10)]
    return {
        name: Column(
            (torch.rand(shapes[i % 5]) * 3).to(dtypes[i % 10]),
            tuple(f"axis{j}" for j in range(len(shapes[i % 5]))),
        )
        for i, name in enumerate(names)
    }


def test_bytes_equal_those_of_the_safetensors_package(tmp_path):
    profiles = many_profiles()
    fingerprint = write_profiles(tmp_path / "ours", profiles)
    ours = (tmp_path / "ours").read_bytes()
    assert fingerprint == {"sha256": hashlib.sha256(ours).hexdigest()}
    with safetensors.safe_open(tmp_path / "ours", framework="pt") as file:
        metadata = file.metadata()
    theirs = safetensors.torch.save({name: p.values for name, p in profiles.items()}, metadata=metadata)
    assert ours == theirs
    axes = {name: list(p.axes) for name, p in profiles.items()}
    assert metadata["wherewhat"] == canonical_json({"axes": axes, VERSION_KEY: SCHEMA_VERSION})


def test_reading_gives_back_every_value_and_axis(tmp_path):
    profiles = many_profiles()
    view = torch.arange(12.0, requires_grad=True).reshape(3, 4).T[::2]
    profiles["view/0/c"] = Column(view, ("x", "y"))
    write_profiles(tmp_path / "file", profiles)
    lazy = ProfileFile(tmp_path / "file")
    package = safetensors.torch.load_file(tmp_path / "file")
    assert set(lazy) == set(package) == set(profiles)
    assert len(lazy) == len(profiles)
    for name, profile in profiles.items():
        for found in (lazy[name], package[name]):
            assert found.dtype == profile.values.dtype
            assert torch.equal(found, profile.values.detach())
        assert lazy.axes(name) == profile.axes
    with pytest.raises(KeyError):
        lazy["missing/0/c"]
    write_profiles(tmp_path / "empty", {})
    assert safetensors.torch.load_file(tmp_path / "empty") == {}
    assert dict(ProfileFile(tmp_path / "empty")) == {}


def test_joining_equals_writing_at_once_in_any_order(tmp_path):
    profiles = many_profiles()
    write_profiles(tmp_path / "whole", profiles)
    names = list(profiles)
    random.Random(0).shuffle(names)
    sources = []
    for i in range(4):
        sources.append(tmp_path / f"part{i}")
        write_profiles(sources[-1], {name: profiles[name] for name in names[i::4]})
    join_profiles(tmp_path / "joined", sources)
    assert (tmp_path / "joined").read_bytes() == (tmp_path / "whole").read_bytes()
    join_profiles(tmp_path / "joined", sources[::-1])
    assert (tmp_path / "joined").read_bytes() == (tmp_path / "whole").read_bytes()


def test_names_that_say_nothing_are_refused(tmp_path):
    for name in ("c", "0/c", "/0/c", "d/0/", "d/x/c", "", "d/0/c/", "d\ud800/0/c"):
        with pytest.raises(StoreError, match="the curve name"):
            write_profiles(tmp_path / "file", {name: Column(torch.ones(1), ("x",))})
        assert list(tmp_path.iterdir()) == []


def test_other_mistakes_are_refused(tmp_path):
    with pytest.raises(StoreError, match="holds a slash"):
        profile_name("d", 0, "a/b")
    with pytest.raises(MeasureError, match=r"the axes \('a', 'b'\) do not fit an array of shape \(3,\)"):
        Column(torch.ones(3), ("a", "b"))
    with pytest.raises(StoreError, match="has type complex64: use one of float64"):
        write_profiles(tmp_path / "file", {"d/0/c": Column(torch.ones(1, dtype=torch.complex64), ("x",))})
    for i in range(2):
        write_profiles(tmp_path / f"{i}", {"d/0/c": Column(torch.ones(1), ("x",))})
    with pytest.raises(StoreError, match="two parts hold the curve 'd/0/c'"):
        join_profiles(tmp_path / "joined", [tmp_path / "0", tmp_path / "1"])
    assert not (tmp_path / "joined").exists()


def test_foreign_and_newer_files_are_refused(tmp_path):
    path = tmp_path / "file"
    for data in (b"", b"short", b"\xff" * 64, safetensors.torch.save({"a": torch.ones(1)})):
        path.write_bytes(data)
        with pytest.raises(StoreError, match="not a file of wherewhat profiles"):
            ProfileFile(path)
    newer = json.dumps({"axes": {}, "wherewhat.schema": 999})
    path.write_bytes(safetensors.torch.save({}, metadata={"wherewhat": newer}))
    with pytest.raises(StoreError, match="schema version 999"):
        ProfileFile(path)


def test_curves_of_several_blocks_give_the_same_bytes(tmp_path, monkeypatch):
    profiles = {f"d/{i}/c": Column(torch.rand(3, 5), ("head", "distance")) for i in range(9)}
    profiles["d/0/b"] = Column(torch.rand(4, 2, dtype=torch.float64).mT, ("head", "query"))
    profiles["d/1/b"] = Column(torch.rand(0), ("query",))
    strided = [
        torch.rand(6)[::2],
        torch.rand(3, 4)[:, 0],
        torch.rand(1).expand(5),
        torch.ones(4, dtype=torch.bool)[::2],
    ]
    strided.append(torch.randn(3, dtype=torch.complex64).conj().imag)  # negated when it is read
    profiles |= {f"d/2/{i}": Column(values, ("query",)) for i, values in enumerate(strided)}
    whole = write_profiles(tmp_path / "whole", profiles)
    for size in (1, 120):
        monkeypatch.setattr("wherewhat.runs.schema._BLOCK", size)
        assert write_profiles(tmp_path / "blocks", profiles) == whole
        assert (tmp_path / "blocks").read_bytes() == (tmp_path / "whole").read_bytes()
    read = ProfileFile(tmp_path / "whole")
    assert all(torch.equal(read[f"d/2/{i}"], values) for i, values in enumerate(strided))


def test_curves_that_cannot_be_encoded_leave_no_file(tmp_path, monkeypatch):
    def failing(tensors):
        yield b"half"
        raise MemoryError

    monkeypatch.setattr("wherewhat.runs.schema._blocks", failing)
    with pytest.raises(MemoryError):
        write_profiles(tmp_path / "file", {"d/0/c": Column(torch.ones(1), ("x",))})
    assert [*tmp_path.iterdir()] == []
