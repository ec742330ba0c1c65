"""Identity: the recipe that ships is the default; wrong recipes are refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.lab import RECIPE, VALUES, write_recipe
from wherewhat.errors import ConfigError
from wherewhat.options import build_recipe
from wherewhat_lab.encoding_study.recipe import ENCODINGS, EncodingRecipe, parse_only, read_recipe
from wherewhat_lab.model import LabModel

SHIPPED = Path(__file__).parents[3] / "recipes" / "encodings.toml"


def test_the_shipped_recipe_is_the_default():
    shipped = read_recipe(SHIPPED)
    standard = EncodingRecipe()
    assert shipped.values() == standard.values()
    assert (shipped.encodings, shipped.seeds) == (standard.encodings, standard.seeds)
    assert shipped.text == SHIPPED.parent / "enwik8.gz"
    assert sorted(shipped.encodings) == sorted(ENCODINGS)
    size = sum(parameter.numel() for parameter in LabModel(shipped.model_for("rope", 0)).parameters())
    assert 9e6 < size < 12e6


def test_models_differ_in_encoding_and_seed_alone(tmp_path):
    assert read_recipe(write_recipe(tmp_path / "r.toml")) == RECIPE
    one, other = RECIPE.model_for("rope", 0), RECIPE.model_for("pope", 1)
    assert (one.encoding, one.seed, other.encoding, other.seed) == ("rope", 0, "pope", 1)
    assert one.positions == other.positions == RECIPE.training.context
    assert RECIPE.training_for(1).data_seed == RECIPE.training_for(0).data_seed


def test_some_models():
    assert parse_only(RECIPE, ()) == [("rope", 0), ("alibi", 0), ("learned", 0)]
    assert parse_only(RECIPE, ("alibi:0", "rope", "rope:0")) == [("alibi", 0), ("rope", 0)]
    with pytest.raises(ConfigError, match="did you mean 'rope'"):
        parse_only(RECIPE, ("rop:0",))
    with pytest.raises(ConfigError, match="encoding:seed"):
        parse_only(RECIPE, ("rope:x",))
    with pytest.raises(ConfigError, match=r"the recipe's seeds are 0$"):
        parse_only(RECIPE, ("rope:99",))
    with pytest.raises(ConfigError, match=r"the recipe's encodings are rope, alibi, learned$"):
        parse_only(RECIPE, ("nope:0",))


def test_wrong_recipes_are_told(subtests, tmp_path):
    for wrong, message in (
        ({"encoding": ["rope"]}, "did you mean 'encodings'"),
        ({"encodings": ["ropes"]}, "did you mean 'rope'"),
        ({"encodings": []}, "at least one"),
        ({"seeds": [0, 0]}, "each once"),
        ({"seeds": [True]}, "tuple of whole numbers"),
        ({"seeds": [-1]}, "a seed of the recipe is -1"),
        ({"watch": {"seed": 2**63}}, f"seed is {2**63}"),
        ({"text": 3}, "text=3 is not a"),
        ({"held_out": "a"}, "held_out='a'"),
        ({"model": {"layer": 2}}, "did you mean 'layers'"),
        ({"model": {"encoding": "rope"}}, "does not belong"),
        ({"model": 3}, "is a table"),
        ({"training": {"seed": 1}}, "does not belong"),
        ({"training": {"steps": "many"}}, "not a whole number"),
        ({"watch": {"documents": 0}}, "documents is 0"),
        ({"watch": {"documents": 9, "loss_windows": 8}}, "among the 8"),
        ({"after": {"methods": ["yarns"]}}, "did you mean 'yarn'"),
        ({"after": {"kinds": ["letters"]}}, "no kind"),
        ({"after": {"times": 0}}, "times is 0"),
    ):
        with subtests.test(wrong=wrong):
            with pytest.raises(ConfigError, match=message) as error:
                build_recipe(EncodingRecipe, {**VALUES, **wrong})
            assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_recipe(tmp_path / "missing.toml")
    (tmp_path / "r.toml").write_text("a = ")
    with pytest.raises(ConfigError, match="not valid TOML"):
        read_recipe(tmp_path / "r.toml")
