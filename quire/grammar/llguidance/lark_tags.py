"""Structural tags in Lark, as llguidance reads it.

Free text that something must follow is a lazy lexeme together with what follows: it ends where that comes first.
A special token is no text: it stands in the grammar by its id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, regex_to_lark

from quire.foundation.errors import InputError
from quire.grammar.tags import Format

Ends = tuple[str, ...]  # texts of which one must follow; none if nothing must
ASCII_CLASSES = "dws"  # \d, \w and \s are what they are in JSON Schema


def translated(
    tag: Format,
    special: Mapping[str, int],
    stop_ids: Sequence[int],
    json_options: Callable[[int | None, Any], dict[str, Any]],
    to_lark: Callable[[str], str],
) -> str:
    """The grammar in llguidance's own form.

    special: ids of special tokens by their names; the stop tokens among them end the answer, and so are left out.
    json_options: how JSON is written, for a limit of whitespace and a schema. to_lark: reads a grammar.
    Raises InputError.
    """
    writer = _Writer(special, stop_ids, json_options, to_lark)
    start = writer.write(tag, ())
    lark = "\n".join([f"start: {start}", *writer.rules])
    grammars = [{"name": "answer", "lark_grammar": lark}, *writer.grammars]
    return json.dumps({"grammars": grammars}) if writer.grammars else str(LLMatcher.grammar_from_lark(lark))


class _Writer:
    def __init__(
        self,
        special: Mapping[str, int],
        stop_ids: Sequence[int],
        json_options: Callable[[int | None, Any], dict[str, Any]],
        to_lark: Callable[[str], str],
    ) -> None:
        self.rules: list[str] = []
        self.grammars: list[dict[str, str]] = []
        self._special = special
        self._stops = {name for name, token in special.items() if token in stop_ids}
        self._marker = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True)))) if special else None
        self._json_options = json_options
        self._to_lark = to_lark
        self._texts: dict[tuple[Any, ...], str] = {}

    def write(self, tag: Format, ends: Ends) -> str:
        """An expression for the format and one of `ends` after it."""
        kind = tag["type"]
        if kind == "any_text":
            return self._any_text(tag.get("excludes", []), tag.get("max_chars"), ends)
        if kind == "sequence":
            return self._sequence(tag["elements"], ends)
        if kind == "or":
            return self._either([self.write(one, ends) for one in tag["elements"]])
        if kind == "optional":
            return self._either([self.write(tag["content"], ends), self._one_of(ends)])
        if kind == "tag":
            return f"{self._literal(tag['begin'])} {self._tag_rest(tag, ends)}"
        if kind == "triggered_tags":
            return self._triggered(tag, ends)
        return f"{self._closed(kind, tag)} {self._one_of(ends)}"

    def _closed(self, kind: str, tag: Format) -> str:
        """Formats that end by themselves."""
        if kind == "const_string":
            return self._literal(tag["value"])
        if kind == "json_schema":
            options = self._json_options(tag.get("max_whitespace_cnt"), tag["json_schema"])
            return self._rule(f"%json {json.dumps({**tag['json_schema'], 'x-guidance': options})}")
        if kind == "regex":
            return self._lexeme(f"/{regex_to_lark(tag['pattern'], ASCII_CLASSES)}/")
        if kind == "grammar":
            name = f"grammar_{len(self.grammars)}"
            self.grammars.append({"name": name, "lark_grammar": self._to_lark(tag["grammar"])})
            return f"@{name}"
        if kind == "tags_with_separator":
            return self._separated(tag)
        content = self._rule(self.write(tag["content"], ()))
        if kind in ("star", "plus"):
            return content + ("*" if kind == "star" else "+")
        low, high = tag["min"] or 0, tag["max"]
        return f"{content}{{{low},{'' if high in (None, -1) else high}}}"

    def _any_text(self, excludes: Sequence[str], max_chars: int | None, ends: Ends) -> str:
        count = "*" if max_chars in (None, -1) else f"{{0,{max_chars}}}"
        text = f"/(?s:.{count})/"
        if any(excludes):
            texts = "|".join(_regex_of(one) for one in excludes if one)
            text += f" & ~/(?s:.*)({texts})(?s:.*)/"
        if not ends:
            return f"{self._lexeme(text)}?"
        found = []
        plain = [end for end in ends if not self._starts_special(end)]
        if plain:
            found.append(self._lazy(text, plain))
        found += [f"{self._lexeme(text)}? {self._literal(end)}" for end in ends if end not in plain]
        return self._either(found)

    def _sequence(self, elements: Sequence[Format], ends: Ends) -> str:
        parts, at = [], 0
        while at < len(elements):
            following = elements[at + 1] if at + 1 < len(elements) else None
            if following is None:
                parts.append(self.write(elements[at], ends))
            elif following["type"] == "const_string" and following["value"]:
                at += 1
                is_last = at + 1 == len(elements)
                parts.append(self.write(elements[at - 1], (following["value"],)))
                if is_last:
                    parts.append(self._one_of(ends))
            elif following["type"] == "tag" and following["begin"]:
                at += 1
                parts.append(self.write(elements[at - 1], (following["begin"],)))
                parts.append(self._tag_rest(following, ends if at + 1 == len(elements) else ()))
            else:
                parts.append(self.write(elements[at], ()))
            at += 1
        return " ".join(parts)

    def _tag_rest(self, tag: Format, ends: Ends) -> str:
        own = tuple(end for end in tag["end"] if end and end not in self._stops)
        if not own:
            return self.write(tag["content"], ends)
        content = self.write(tag["content"], own)
        if len(own) < len(tag["end"]):
            content = self._either([content, self.write(tag["content"], ())])
        return f"{content} {self._one_of(ends)}"

    def _separated(self, tag: Format) -> str:
        one = self._rule(self._either([self.write(each, ()) for each in tag["tags"]]))
        more = "" if tag.get("stop_after_first") else f" ({self._literal(tag['separator'])} {one})*"
        return f"({one}{more})" if tag.get("at_least_one") else f"({one}{more})?"

    def _triggered(self, tag: Format, ends: Ends) -> str:
        excludes = tag.get("excludes", [])
        by_trigger: dict[str, list[Format]] = {}
        for one in tag["tags"]:
            trigger = next(trigger for trigger in tag["triggers"] if one["begin"].startswith(trigger))
            by_trigger.setdefault(trigger, []).append(one)
        found = []
        for trigger, tags in by_trigger.items():
            rests = [f"{self._literal(one['begin'][len(trigger) :])} {self._tag_rest(one, ())}" for one in tags]
            found.append(f"{self._any_text(excludes, None, (trigger,))} {self._either(rests)}")
        after_text = self._rule(self._either(found))
        tail = self._any_text(excludes, None, ends)
        is_single = tag.get("stop_after_first")
        if tag.get("at_least_one"):
            first = self._either([self.write(one, ends if is_single else ()) for one in tag["tags"]])
            return first if is_single else f"{first} {after_text}* {tail}"
        if is_single:
            return self._either([f"{after_text} {self._one_of(ends)}", tail])
        return f"{after_text}* {tail}"

    # Pieces of Lark

    def _literal(self, text: str) -> str:
        """A text in quotes; the special tokens in it by their ids."""
        parts, at = [], 0
        for match in self._marker.finditer(text) if self._marker else ():
            parts += [_quoted(text[at : match.start()]), self._token(match.group())]
            at = match.end()
        return " ".join(part for part in (*parts, _quoted(text[at:])) if part)

    def _token(self, name: str) -> str:
        return "" if name in self._stops else f"<[{self._special[name]}]>"

    def _starts_special(self, text: str) -> bool:
        return bool(self._marker and self._marker.match(text))

    def _one_of(self, ends: Ends) -> str:
        return self._either([self._literal(end) for end in ends]) if ends else ""

    def _either(self, options: Sequence[str]) -> str:
        if len(options) == 1:
            return options[0]
        full = [option for option in options if option.strip()]
        return f"({' | '.join(full)})" + ("?" if len(full) < len(options) else "")

    def _rule(self, body: str) -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}: {body.strip() or _quoted('', always=True)}")
        return name

    def _lexeme(self, body: str) -> str:
        name = self._texts.get((body,))
        if name is None:
            name = self._texts[(body,)] = f"T{len(self.rules)}"
            self.rules.append(f"{name}: {body}")
        return name

    def _lazy(self, text: str, ends: Sequence[str]) -> str:
        """Text up to the first of `ends`, that one included."""
        head, tails = [], []
        for end in ends:
            match = self._marker.search(end) if self._marker else None
            head.append(_quoted(end if match is None else end[: match.start()]))
            tails.append("" if match is None else self._literal(end[match.start() :]))
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}[lazy]: {self._lexeme(text)} ({' | '.join(head)})")
        if not any(tails):
            return name
        if len(ends) > 1:
            raise InputError("a structural tag may have one end only if a special token stands within it")
        return f"{name} {tails[0]}"


def _quoted(text: str, *, always: bool = False) -> str:
    return json.dumps(text, ensure_ascii=False) if text or always else ""


def _regex_of(text: str) -> str:
    """A regex for exactly this text, within slashes."""
    return "".join(f"\\{char}" if char in r"\.+*?()|[]{}^$/#&-~" else char.replace("\n", r"\n") for char in text)
