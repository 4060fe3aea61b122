"""Random JSON schemas, by seed: small ones whose texts end, and now and then one whose texts need not."""

from __future__ import annotations

import random
from typing import Any

NAMES = ("name", "age", "color", "city", "id", "price", "tags", "is open", "a/b", 'q"', "größe")
WORDS = ("red", "green", "blue", "Oslo", "Paris", "", "yes", 'say "no"', "ä\n", "12")
PATTERNS = ("^[a-z]{1,6}$", "^[A-Z][a-z]{0,5}$", "^\\d{2,4}-\\d{2}$", "^(ab|cd){1,3}$")


def schema_of(seed: int) -> dict[str, Any]:
    """An object's schema."""
    rng = random.Random(seed)
    schema = _object(rng, 3)
    if rng.random() < 0.3:
        schema["$defs"] = {"leaf": _leaf(rng)}
        schema["properties"]["by reference"] = {"$ref": "#/$defs/leaf"}
        schema["required"].append("by reference")
    return schema


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.choice(("leaf", "leaf", "object", "array", "any")) if depth else "leaf"
    if kind == "object":
        return _object(rng, depth)
    if kind == "array":
        low = rng.randrange(3)
        return {"type": "array", "items": _value(rng, depth - 1), "minItems": low, "maxItems": low + rng.randrange(3)}
    if kind == "any":
        return {"anyOf": [_value(rng, depth - 1) for _ in range(rng.randrange(1, 4))]}
    return _leaf(rng)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randrange(1, 5))
    properties = {name: _value(rng, depth - 1) for name in names}
    required = [name for name in names if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _leaf(rng: random.Random) -> dict[str, Any]:
    low = rng.randrange(-50, 50)
    high = low + rng.randrange(1, 1000)
    return rng.choice(
        (
            {"type": "boolean"},
            {"type": "null"},
            {"type": "integer", "minimum": low, "maximum": high},
            {"type": "number", "exclusiveMinimum": low, "maximum": high},
            {"type": "integer", "minimum": low - low % 5, "multipleOf": 5, "maximum": high + 5},
            {"type": "string", "maxLength": rng.randrange(1, 12)},
            {"type": "string", "minLength": 2, "maxLength": 6},
            {"type": "string", "pattern": rng.choice(PATTERNS)},
            {"type": "string", "format": rng.choice(("date", "time", "ipv4", "uuid"))},
            {"enum": rng.sample((*WORDS, 1, 2.5, None, True), rng.randrange(1, 5))},
            {"const": rng.choice(WORDS)},
            {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
        )
    )
