"""Answers taken apart: reasoning, content and tool calls, told from the markers that models write between them."""
