"""Layouts of tool calls that several families share. A family fills in its markers and words."""
