"""Keys as text: what is written is read as the same key, types included."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyloft import InvalidKey
from keyloft.core import key_text
from keyloft.core.keys import TupleKey

parts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.integers(),
    st.floats(),
    st.booleans(),
    st.binary(max_size=8),
)


@given(st.lists(parts, min_size=1, max_size=4).map(tuple))
def test_a_key_comes_back_from_its_text_with_its_types(key: TupleKey) -> None:
    assert repr(key_text.read(key_text.write(key))) == repr(key)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (("users", "alice"), "users/alice"),
        (("a/b", "100%", "=x", ""), "a%2Fb/100%25/%3Dx/="),
        ((42, -7, 1.5, True, False, b"\x00\xff"), "=42/=-7/=1.5/=true/=false/=x00ff"),
    ],
)
def test_keys_are_written_like_this(key: TupleKey, text: str) -> None:
    assert key_text.write(key) == text
    assert key_text.read(text) == key


@pytest.mark.parametrize("text", ["", "a//b", "/a", "=zz", "=x0", "50%", "%ff", "=" + "9" * 5000])
def test_what_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(InvalidKey):
        key_text.read(text)
