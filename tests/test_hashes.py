"""Identity: equal configurations meet in one hash, different ones do not, and nothing unhashable slips in."""

import hashlib
import json
import os

import pytest

from wherewhat.errors import ConfigError, StoreError
from wherewhat.files import canonical_json, config_hash, file_sha256


def test_equal_configurations_meet_in_one_hash_and_others_do_not():
    assert config_hash({"a": 1, "b": {"c": [1, 2], "d": None}}) == config_hash({"b": {"d": None, "c": (1, 2)}, "a": 1})
    others = [{"a": 1}, {"a": 2}, {"a": 1.0}, {"a": True}, {"a": "1"}, {"a": [1]}, {"b": 1}, {}]
    assert len({config_hash(other) for other in others}) == len(others)


def test_canonical_form_is_sorted_compact_and_exact():
    config = {"b": 0.1, "a": 1e-300, "é": "ü", "z": 2**70}
    text = canonical_json(config)
    assert text == '{"a":1e-300,"b":0.1,"z":1180591620717411303424,"é":"ü"}'
    assert canonical_json(json.loads(text)) == text
    assert config_hash(config) == hashlib.sha256(text.encode()).hexdigest()  # the same in every process and release


WRONG = [
    ({"a": {"b": float("nan")}}, "config.a.b is nan"),
    ({"a": [0.0, float("-inf")]}, r"config.a\[1\] is -inf"),
    ({1: 2}, "has the key 1 of type int"),
    ({"a": {"b": {1, 2}}}, "config.a.b has type set"),
    ({"a": b"x"}, "config.a has type bytes"),
    ({"a": "\ud800"}, "lone surrogate"),
    ({"\udcff": 1}, "lone surrogate"),
]


def test_what_json_cannot_carry_is_refused_in_one_line(subtests):
    for config, words in WRONG:
        with subtests.test(words=words):
            with pytest.raises(ConfigError, match=words) as caught:
                config_hash(config)
            assert "\n" not in str(caught.value)


def test_file_hash_equals_hashlib(tmp_path):
    data = os.urandom((1 << 20) + 17)
    (tmp_path / "file").write_bytes(data)
    assert file_sha256(tmp_path / "file") == hashlib.sha256(data).hexdigest()
    with pytest.raises(StoreError, match=r"cannot read .*missing: No such file"):
        file_sha256(tmp_path / "missing")
