"""Bytes that a lowered program holds, counted over its graphs in the order of its schedule."""
