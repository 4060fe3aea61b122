"""Hypothesis strategies that several test folders share."""

from hypothesis import strategies as st

# Text that a JSON request can carry: every code point but lone surrogates.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
