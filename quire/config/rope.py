"""Rotary positions as config.json declares them, in one form: `rope_parameters`, an object that holds everything.

Older files have `rope_theta` beside `rope_scaling`, newer ones `rope_parameters`, some both. As in transformers, a
`rope_scaling` comes before `rope_parameters`, and what stands inside either before what stands beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.reading import read, read_positive, read_section
from quire.foundation.errors import ConfigError
from quire.foundation.json_file import shown

DEFAULT_THETA = 10000.0
_SECTIONS = ("rope_scaling", "rope_parameters")
_BESIDE = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
ROPE_KEYS = (*_SECTIONS, *_BESIDE)
# Settings that each kind has besides those of all.
KINDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("factor", "attention_factor", "short_factor", "long_factor"),
    "ntk": ("factor", "mixed_b"),
    "yarn": ("factor", "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"),
}
_COMMON = ("rope_type", "type", *_BESIDE)
_BY_COLUMN = ("short_factor", "long_factor")  # lists, a number for each pair of columns that turn together
_OWN = (
    "llama_4_scaling_beta",
    "alpha",
    "short_mscale",
    "long_mscale",
)  # known to families alone that say what is usual
_SINGLE = (*_BESIDE, *_OWN)  # usual if missing; others only if there are no settings
_LAYERS = ("full_attention", "sliding_attention")
_NEUTRAL_AT_1 = ("attn_factor", "extrapolation_factor", "alpha")


def read_rope(
    config: Mapping[str, Any], overrides: Mapping[str, Any], usual: Mapping[str, Any], max_position: int
) -> tuple[dict[str, Any], list[str]]:
    """Complete settings, or such for each kind of layer where a family has two kinds; and what means nothing there.

    usual: of the family, what is missing; by kind of layer, if it has two. Without a share of the head, all turns.
    may_be_none: a file may say that nothing turns, by a base of null; that is rope_type "none".
    Raises ConfigError.
    """
    if _LAYERS[0] in usual:
        found, ignored = {}, []
        for kind, rope in _by_layer(config, overrides, usual).items():
            found[kind] = check_rope(rope, max_position)
            ignored += [f"rope_parameters.{kind}.{key}" for key in unknown_rope_keys(rope)]
        return found, ignored
    if usual.get("may_be_none") and _says_none({**config, **overrides}):
        return {"rope_type": "none"}, []
    usual = {key: value for key, value in usual.items() if key != "may_be_none"}
    merged = merge_rope(config, overrides)
    told = any(read_section(given, key) for given in (config, overrides) for key in _SECTIONS)
    rope = {**{key: value for key, value in usual.items() if not told or key in _SINGLE}, **merged}
    if "partial_rotary_factor" not in usual and read(float, rope, "partial_rotary_factor", 1.0) != 1:
        raise ConfigError(
            f"config.json: partial_rotary_factor={shown(rope['partial_rotary_factor'])} is not supported: this family "
            "turns whole heads",
            "partial_rotary_factor",
        )
    own = {key: read(float, rope, key) for key in _OWN if key in usual}
    common = {key: value for key, value in rope.items() if key not in own}
    checked = check_rope(common, max_position)
    if "llama_4_scaling_beta" in own:  # which goes by the trained length, whatever the kind
        checked["original_max_position_embeddings"] = read_positive(
            common, "original_max_position_embeddings", max_position
        )
    return {**checked, **own}, [f"rope_parameters.{key}" for key in unknown_rope_keys(common)]


def _says_none(config: Mapping[str, Any]) -> bool:
    section = read_section(config, "rope_parameters")
    return "rope_theta" in section and section["rope_theta"] is None and config.get("rope_theta") is None


def _by_layer(
    config: Mapping[str, Any], overrides: Mapping[str, Any], usual: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Of each kind of layer: what overrides say of it, else the file. Older files have `rope_theta` and `rope_scaling`,
    which are the full layers', and `rope_local_base_freq`, the others'."""
    merged: dict[str, dict[str, Any]] = {kind: {} for kind in _LAYERS}
    for given in (config, overrides):
        parameters = read_section(given, "rope_parameters")
        if strange := [key for key in parameters if key not in _LAYERS]:
            raise ConfigError(
                f"config.json: rope_parameters must be given for {' and '.join(_LAYERS)}, got {strange[0]}",
                "rope_parameters",
            )
        for kind in _LAYERS:
            if section := read_section(parameters, kind):
                merged[kind] = {key: value for key, value in section.items() if value is not None}
        merged[_LAYERS[0]].update(read_section(given, "rope_scaling"))
        for key, kind in (("rope_theta", _LAYERS[0]), ("rope_local_base_freq", _LAYERS[1])):
            if given.get(key) is not None and (given is overrides or "rope_theta" not in merged[kind]):
                merged[kind]["rope_theta"] = given[key]
    return {kind: {**usual[kind], **rope} for kind, rope in merged.items()}


def merge_rope(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of a config.json under overrides, each of which replaces what the file says of the same, in
    whatever form the file says it. A section of the overrides without a base, or a share of the head, keeps the file's.

    Raises ConfigError for what is not of its type, and for rotary settings that differ by layer.
    """
    told, wanted = _one_section(config), _one_section(overrides)
    beside = {key: overrides[key] for key in _BESIDE if overrides.get(key) is not None}
    if any(key in overrides for key in _SECTIONS):
        kept: dict[str, Any] = {key: told[key] for key in ("rope_theta", "partial_rotary_factor") if key in told}
        if config.get("original_max_position_embeddings") is not None:
            kept["original_max_position_embeddings"] = config["original_max_position_embeddings"]
        return {**kept, **beside, **wanted}
    return {**told, **beside}


def check_rope(rope: Mapping[str, Any], max_position: int) -> dict[str, Any]:
    """Complete settings, each of its type: rope_type, rope_theta, partial_rotary_factor, factor …; and, for the kinds
    that need it, the trained length.

    Raises ConfigError.
    """
    kind = read(str, rope, "rope_type", read(str, rope, "type", "default"))
    kind = "longrope" if kind == "su" else kind
    if kind not in KINDS:
        raise ConfigError(f"config.json: rope_type must be one of {', '.join(KINDS)}, got {kind!r}", "rope_type")
    theta = read(float, rope, "rope_theta", DEFAULT_THETA)
    if theta <= 0 or (kind == "yarn" and theta <= 1):
        raise ConfigError(f"config.json: rope_theta must be > {int(kind == 'yarn')}, got {theta:g}", "rope_theta")
    partial = read(float, rope, "partial_rotary_factor", 1.0)
    if not 0 < partial <= 1:
        raise ConfigError(f"config.json: partial_rotary_factor must be in (0, 1], got {partial:g}")
    for key in _NEUTRAL_AT_1:
        if rope.get(key) not in (None, 1):
            raise ConfigError(f"config.json: {key}={shown(rope[key])} of rope_type={kind} is not supported", key)
    found: dict[str, Any] = {"rope_type": kind, "rope_theta": theta, "partial_rotary_factor": partial}
    if kind in ("llama3", "yarn", "dynamic", "longrope"):
        found["original_max_position_embeddings"] = read_positive(
            rope, "original_max_position_embeddings", max_position
        )
    for key in KINDS[kind]:
        value = _setting(rope, key)
        if value is not None:
            found[key] = value
    return _check_scaling(kind, found, max_position)


def _setting(rope: Mapping[str, Any], key: str) -> Any:
    if key not in _BY_COLUMN:
        return read(bool, rope, key, None) if key == "truncate" else read(float, rope, key, None)
    numbers = rope.get(key)
    if (
        not isinstance(numbers, list)
        or not numbers
        or not all(
            isinstance(number, int | float) and not isinstance(number, bool) and 0 < number < 1e6 for number in numbers
        )
    ):
        raise ConfigError(f"config.json: the rotary {key} must be a list of numbers > 0, got {shown(numbers)}", key)
    return [float(number) for number in numbers]


def unknown_rope_keys(rope: Mapping[str, Any]) -> list[str]:
    """Settings that mean nothing to this kind."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    known = (*_COMMON, *_NEUTRAL_AT_1, *(KINDS.get(kind, ()) if isinstance(kind, str) else ()))
    return [key for key in rope if key not in known]


def context_length(rope: Mapping[str, Any], max_position: int) -> int:
    """Positions a model was made for, of which its config.json says `max_position`: YaRN stretches what was trained."""
    rope = rope.get(_LAYERS[0], rope)
    if rope.get("rope_type") != "yarn":
        return max_position
    return max(max_position, int(rope["original_max_position_embeddings"] * rope["factor"]))


def _check_scaling(kind: str, rope: dict[str, Any], max_position: int) -> dict[str, Any]:
    if kind in ("yarn", "longrope") and "factor" not in rope:
        rope["factor"] = max_position / rope["original_max_position_embeddings"]
    if kind in ("linear", "llama3"):
        for key in KINDS[kind]:
            read(float, rope, key)
    if kind == "ntk":
        read(float, rope, "factor")
    for key in ("factor", "beta_fast", "beta_slow", "attention_factor"):
        if key in rope and rope[key] <= 0:
            raise ConfigError(f"config.json: the rotary {key} must be > 0, got {rope[key]:g}", key)
    if rope.get("factor", 1) > 1e6:
        raise ConfigError(f"config.json: the rotary factor must be <= 1e6, got {rope['factor']:g}", "factor")
    if kind == "llama3" and rope["high_freq_factor"] <= rope["low_freq_factor"]:
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        raise ConfigError(f"config.json: high_freq_factor must be > low_freq_factor={low:g}, got {high:g}")
    return rope


def _one_section(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a file (or overrides) says, as one object."""
    scaling, parameters = (_uniform(read_section(config, key), key) for key in _SECTIONS)
    section = {key: value for key, value in (scaling or parameters).items() if value is not None}
    trained = config.get("original_max_position_embeddings")
    for key in ("rope_theta", "partial_rotary_factor"):
        if config.get(key) is not None:
            section.setdefault(key, config[key])
    return section if trained is None else {**section, "original_max_position_embeddings": trained}


def _uniform(section: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A section, or that which it gives for every kind of layer if they are the same."""
    by_layer = [value for name, value in section.items() if name.endswith("_attention")]
    if not by_layer:
        return section
    if any(value != by_layer[0] for value in by_layer[1:]) or len(by_layer) != len(section):
        raise ConfigError(f"config.json: {key} differs by the kind of layer, which is not supported", key)
    return read_section({key: by_layer[0]}, key)
