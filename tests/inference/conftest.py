import pytest

from tests.inference.models import KINDS, Pair


@pytest.fixture(scope="session")
def pairs(tmp_path_factory) -> dict[str, Pair]:
    """A tiny model of each kind, all with the same weights."""
    folder = tmp_path_factory.mktemp("models")
    return {kind: Pair(folder, kind) for kind in KINDS}


@pytest.fixture(params=KINDS)
def pair(request, pairs) -> Pair:
    return pairs[request.param]
