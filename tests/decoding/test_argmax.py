"""The argmax in two passes is the argmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.decoding.argmax import first_argmax

B, V = 3, 9

argmax = jax.jit(first_argmax)


@given(
    st.lists(
        st.lists(
            st.sampled_from([-np.inf, -1.0, -0.0, 0.0, 2.0, np.inf]),
            min_size=V,
            max_size=V,
        ),
        min_size=B,
        max_size=B,
    )
)
@settings(max_examples=50)
def test_it_is_the_lowest_index_of_the_largest(rows):
    x = np.array(rows, np.float32)
    got = argmax(jnp.asarray(x))
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, x.argmax(axis=1))


@pytest.mark.parametrize("place", [0, 4, V - 1])
def test_a_row_with_nan_gives_an_index_inside_it_and_leaves_the_others_alone(place):
    x = np.random.default_rng(0).normal(size=(B, V)).astype(np.float32)
    wanted = x.argmax(axis=1)
    x[1, place] = np.nan
    got = np.asarray(argmax(jnp.asarray(x)))
    assert 0 <= got[1] < V
    np.testing.assert_array_equal(got[[0, 2]], wanted[[0, 2]])
    whole = argmax(jnp.full((B, V), jnp.nan, jnp.float32))
    assert ((whole >= 0) & (whole < V)).all()
