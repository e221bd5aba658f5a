import pytest

# Its assertions then explain their failures, as those in a test's own file do.
pytest.register_assert_rewrite("tests.engines.contract")
