from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from quire.foundation.wire import INLINE_BYTES, Channel, Decoder, Encoder, WireError
from quire.types.plan import Admit, NewBlocks, PromptLogprobs, SharedPrefixes, StepPlan
from quire.types.result import LogprobRows, StepResult
from quire.types.sampling import SamplingParams


class Holder(msgspec.Struct):
    arrays: list[np.ndarray]
    name: str = ""


ENCODER, DECODER = Encoder(), Decoder[Holder](Holder)
DTYPES = st.sampled_from(["bool", "int8", "int32", "int64", "uint8", "uint64", "float16", "float32", "float64"])


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@settings(max_examples=150, deadline=None)
@given(st.lists(hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)), max_size=4))
def test_arrays_come_back_as_they_were(arrays: list[np.ndarray]) -> None:
    back = DECODER.decode(ENCODER.encode(Holder(arrays))).arrays
    for sent, got in zip(arrays, back, strict=True):
        assert got.dtype == sent.dtype
        assert got.shape == sent.shape
        assert got.tobytes() == sent.tobytes()


def test_large_arrays_travel_beside_the_message_uncopied() -> None:
    big = np.arange(INLINE_BYTES, dtype=np.int32)
    frames = ENCODER.encode(Holder([big, ints(1, 2), big[::2]]))
    assert len(frames) == 3
    assert len(frames[0]) < 200
    assert np.shares_memory(np.frombuffer(frames[1], np.int32), big)
    back = DECODER.decode(frames).arrays
    assert np.shares_memory(back[0], big)
    assert back[2].tolist() == big[::2].tolist()


def test_a_plan_and_a_result_come_back() -> None:
    params = SamplingParams(temperature=0.5, logit_bias={5: -1.5}, stop=["x"])
    plan = StepPlan(
        step=7,
        admits=[Admit(3, 16, 20, params, [2], 99)],
        seats=ints(1, 3),
        num_tokens=ints(1, 4),
        num_decodes=1,
        token_ids=ints(4, 5, 6, 7),
        samples=np.array([True, False]),
        blocks=[NewBlocks(ints(3), ints(1), ints(9))],
        max_seq_len=33,
        releases=[2],
        attachments=[PromptLogprobs(ints(1), ints(2), ints(5)), PromptLogprobs(ints(0), ints(-1), ints(-1))],
        prefixes=SharedPrefixes(ints(1, 5), ints(0, 2), ints(32)),
    )
    back = Decoder[StepPlan](StepPlan).decode(ENCODER.encode(plan))
    assert back.admits == plan.admits
    assert back.attachments[0].next_ids.tolist() == [2]
    assert back.prefixes is not None
    assert [array.tolist() for array in msgspec.structs.astuple(back.prefixes)] == [[1, 5], [0, 2], [32]]
    assert back.samples.tolist() == [True, False]
    assert back.blocks[0].blocks.dtype == np.int32
    lines = LogprobRows(ints(0), ints(2), ints(4, 5).reshape(1, 2), np.zeros((1, 2), np.float32), ints(1))
    result = StepResult(step=7, tokens=ints(4, -1).reshape(2, 1), counts=ints(1, 0), logprobs=lines)
    got = Decoder[StepResult](StepResult).decode(ENCODER.encode(result))
    assert got.tokens.shape == (2, 1)
    assert got.logprobs is not None
    assert got.logprobs.token_ids.tolist() == [[4, 5]]


@pytest.mark.parametrize("value", [object(), {1, 2}.__iter__(), np.array([object()]), np.zeros((1,) * 9), 2**70])
def test_what_cannot_travel_is_refused_when_sent(value: object) -> None:
    with pytest.raises(WireError):
        Encoder().encode([value])


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\xc1"],
        [msgspec.msgpack.encode({"arrays": 3})],
        [msgspec.msgpack.encode({"arrays": [1]})],
        [b"\x91" * 100_000],
        [b"\x81\xa6arrays\xdd\xff\xff\xff\xff"],  # a list that claims four thousand million entries
    ],
)
def test_broken_messages_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        DECODER.decode(frames)


FRAMES = [bytes(f) for f in ENCODER.encode(Holder([np.arange(INLINE_BYTES, dtype=np.int32), ints(1, 2, 3)], "n"))]


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_random_and_damaged_bytes_never_crash_the_decoder(data: st.DataObject) -> None:
    if data.draw(st.booleans()):
        frames = data.draw(st.lists(st.binary(max_size=200), max_size=3))
    else:
        body = bytearray(FRAMES[0])
        for _ in range(data.draw(st.integers(1, 4))):
            body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
        cut = data.draw(st.integers(0, len(body)))
        frames = [bytes(body[:cut] if data.draw(st.booleans()) else body), *FRAMES[1 : data.draw(st.integers(1, 2))]]
    try:
        holder = DECODER.decode(frames)
    except WireError:
        return
    assert all(isinstance(array, np.ndarray) for array in holder.arrays)
    assert sum(int(array.view(np.uint8).sum()) if array.size and array.ndim else 0 for array in holder.arrays) >= 0


def test_a_channel_keeps_order_and_wakes_its_reader(tmp_path) -> None:
    parent: Channel[Holder] = Channel(tmp_path, Holder, parent=True)
    child: Channel[Holder] = Channel(tmp_path, Holder, parent=False)
    assert parent.receive() is None
    assert not parent.wait(0.01)
    big = np.arange(INLINE_BYTES, dtype=np.int32)
    for i in range(50):
        child.send(Holder([big] if i % 10 == 0 else [ints(i)], str(i)))
    got = []
    while len(got) < 50:
        assert parent.wait(5)
        while (message := parent.receive()) is not None:
            got.append(message)
    assert [m.name for m in got] == [str(i) for i in range(50)]
    assert got[40].arrays[0].tolist() == big.tolist()
    child.close()
    parent.close()
