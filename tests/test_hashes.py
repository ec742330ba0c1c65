"""Identity: equal configurations meet in one hash, different ones do not, and nothing unhashable slips in."""

import hashlib
import json
import os
import subprocess
import sys

import pytest

from wherewhat.errors import ConfigError, StoreError
from wherewhat.hashes import canonical_json, config_hash, file_sha256


def test_order_of_keys_and_kind_of_sequence_do_not_count():
    assert config_hash({"a": 1, "b": {"c": [1, 2], "d": None}}) == config_hash({"b": {"d": None, "c": (1, 2)}, "a": 1})


@pytest.mark.parametrize("other", [{"a": 2}, {"a": 1.0}, {"a": True}, {"a": "1"}, {"a": [1]}, {"b": 1}, {}])
def test_different_configurations_differ(other):
    assert config_hash({"a": 1}) != config_hash(other)


def test_canonical_form_is_sorted_compact_and_exact():
    text = canonical_json({"b": 0.1, "a": 1e-300, "é": "ü", "z": 2**70})
    assert text == '{"a":1e-300,"b":0.1,"z":1180591620717411303424,"é":"ü"}'
    assert canonical_json(json.loads(text)) == text


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"a": {"b": float("nan")}}, "config.a.b is nan"),
        ({"a": [0.0, float("-inf")]}, r"config.a\[1\] is -inf"),
        ({1: 2}, "has the key 1 of type int"),
        ({"a": {"b": {1, 2}}}, "config.a.b has type set"),
        ({"a": b"x"}, "config.a has type bytes"),
        ({"a": "\ud800"}, "lone surrogate"),
        ({"\udcff": 1}, "lone surrogate"),
    ],
)
def test_what_json_cannot_carry_is_refused_in_one_line(config, words):
    with pytest.raises(ConfigError, match=words) as caught:
        config_hash(config)
    assert "\n" not in str(caught.value)


def test_hash_is_the_same_in_another_process():
    code = """
import sys
from wherewhat.hashes import config_hash
sys.stdout.write(config_hash({"b": 0.1, "a": {"x": 1, "y": 2}}))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    hashes = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**environment, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert hashes == {config_hash({"a": {"y": 2, "x": 1}, "b": 0.1})}


def test_importing_the_store_imports_nothing_heavy():
    code = """
import sys
import wherewhat.runs.directory
sys.exit(any(name in sys.modules for name in ("torch", "pyarrow", "numpy", "filelock", "safetensors")))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_file_hash_equals_hashlib(tmp_path):
    data = os.urandom((1 << 20) + 17)
    (tmp_path / "file").write_bytes(data)
    assert file_sha256(tmp_path / "file") == hashlib.sha256(data).hexdigest()
    with pytest.raises(StoreError, match=r"cannot read .*missing: No such file"):
        file_sha256(tmp_path / "missing")
