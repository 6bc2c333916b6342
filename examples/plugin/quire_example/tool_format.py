"""Calls between double brackets: [[call]]{"name": …, "arguments": {…}}[[/call]]."""

from quire.parsers.layouts.json_calls import JsonCalls

BRACKETS = JsonCalls(
    openings=("[[call]]",), closings=("[[/call]]",), begin="[[call]]", end="[[/call]]", joint="\n"
)  # fmt: skip
