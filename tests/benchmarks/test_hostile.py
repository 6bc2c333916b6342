import pickle

import pytest

from benchmarks.hostile.clients import Client, Kind
from benchmarks.hostile.grammars import Grammars
from benchmarks.hostile.texts import MAKERS, SENT, Texts
from quire.config.serve import ServeConfig


@pytest.mark.parametrize("kind", [Grammars("llguidance"), Texts(tuple(MAKERS))])
def test_each_hostile_post_has_a_harmless_one_in_its_place(kind: Kind) -> None:
    sent = pickle.loads(pickle.dumps(kind))  # to the clients' process
    client = Client("http://localhost", "m")
    for name, post in sent.hostile().items():
        taken, refused = (sent.harmless(post, is_taken) for is_taken in (True, False))
        assert taken.path == refused.path == post.path, name
        assert taken != refused, name
        assert max(len(client.content(one)) for one in (taken, refused)) < 1024 < ServeConfig.max_body_bytes


def test_long_texts_are_as_long_as_they_say_and_come_past_the_limit_of_bodies() -> None:
    client = Client("http://localhost", "m")
    sizes = {name: len(client.content(post)) for name, post in Texts(tuple(MAKERS)).hostile().items()}
    assert sizes.keys() == SENT.keys()
    assert all(0 <= sizes[name] - size < 200 for name, (_, _, size) in SENT.items())
    assert max(sizes.values()) < ServeConfig.max_body_bytes
    assert not Texts(()).hostile()
