from collections.abc import Iterator

import pytest

from tests.launchers.joining.head import Head


@pytest.fixture
def head() -> Iterator[Head]:
    found = Head()
    yield found
    found.close()
