"""Length methods with parameters other than their defaults, as benchmarks name them."""

from __future__ import annotations

import dataclasses

from wherewhat.caches.plan import Plan
from wherewhat.errors import WherewhatError
from wherewhat.lengths import LengthMethod, NearFar, find_method

PLANNED = "near-far-plan"
"""Name of near-far for the heads of a plan."""


def variant(text: str, plan: Plan | None = None) -> LengthMethod:
    """Return a method with parameters: ``near-far:top=64,seen=averaged``.

    ``near-far-plan`` is near-far for the heads of the plan.
    """
    name, _, given = text.partition(":")
    planned = name == PLANNED
    if planned and plan is None:
        raise WherewhatError(f"{text!r} needs a plan")
    method = NearFar if planned else find_method(name)
    fields = {field.name for field in dataclasses.fields(method)}
    options: dict[str, int | str | Plan | None] = {"plan": plan} if planned else {}
    for part in given.split(","):
        key, _, value = part.partition("=")
        if key not in fields or not value:
            raise WherewhatError(f"{text!r} has no option of {name}: give OPTION=VALUE, of {', '.join(sorted(fields))}")
        options[key] = int(value) if value.isdecimal() else value
    return method(**options)
