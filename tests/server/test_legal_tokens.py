"""Constraints that leave no token to sample are refused: the engine would return token 0 again and again."""

import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from fake_engine import FakeEngineServer, failure_of, make_config, within
from fake_engine.core import EOS, MAX_MODEL_LEN
from tokenwire.v1.sampling_params_pb2 import TokenIds
from tokenwire_server.simulated_device import write_model_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")

MORE_EOS = 30
"""The model's second EOS id."""
SMALL = 100
"""A vocabulary that other constraints than allowed_token_ids can exhaust."""


def ids(*token_ids: int) -> TokenIds:
    return TokenIds(token_ids=token_ids)


ALLOWED, WORDS, STOP, MIN = "allowed_token_ids", "bad_words_token_ids", "stop_token_ids", "min_tokens"

# Sampling fields, and those that leave nothing; () where they leave something.
CASES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    # Two that exclude each other.
    ({ALLOWED: ids(7), WORDS: [ids(7)]}, (ALLOWED, WORDS)),
    ({ALLOWED: ids(7, 8), WORDS: [ids(8), ids(7), ids(9)]}, (ALLOWED, WORDS)),
    ({ALLOWED: ids(7, 8), WORDS: [ids(7)]}, ()),
    ({ALLOWED: ids(7), WORDS: [ids(7, 7), ids(8)]}, ()),
    ({ALLOWED: ids(EOS), MIN: 5}, (ALLOWED, MIN)),
    ({ALLOWED: ids(MORE_EOS), MIN: 1}, (ALLOWED, MIN)),
    ({ALLOWED: ids(EOS, MORE_EOS), MIN: 1}, (ALLOWED, MIN)),
    ({ALLOWED: ids(EOS), MIN: 1, "ignore_eos": True}, (ALLOWED, MIN)),
    ({ALLOWED: ids(EOS), MIN: 0}, ()),
    ({ALLOWED: ids(EOS), "ignore_eos": True}, ()),
    ({ALLOWED: ids(EOS, 7), MIN: 5}, ()),
    ({ALLOWED: ids(7), STOP: [7], MIN: 5}, (ALLOWED, STOP, MIN)),
    ({ALLOWED: ids(7), STOP: [7]}, ()),
    ({ALLOWED: ids(7), STOP: [8], MIN: 5}, ()),
    # Three and more, of which no two do.
    ({ALLOWED: ids(7, 8), WORDS: [ids(7)], STOP: [8], MIN: 5}, (ALLOWED, WORDS, STOP, MIN)),
    ({ALLOWED: ids(7, EOS), WORDS: [ids(7)], MIN: 5}, (ALLOWED, WORDS, MIN)),
    ({ALLOWED: ids(7, 8, EOS), WORDS: [ids(7)], STOP: [8], MIN: 5}, (ALLOWED, WORDS, STOP, MIN)),
    ({ALLOWED: ids(7, 8, 9), WORDS: [ids(7)], STOP: [8], MIN: 5}, ()),
    ({ALLOWED: ids(7, 8), WORDS: [ids(7)], STOP: [8]}, ()),
    # Without allowed_token_ids, in a small vocabulary.
    ({WORDS: [ids(i) for i in range(SMALL)]}, (WORDS,)),
    ({WORDS: [ids(i) for i in range(SMALL - 1)]}, ()),
    ({WORDS: [ids(i) for i in range(SMALL) if i not in {EOS, MORE_EOS}], MIN: 1}, (WORDS, MIN)),
    ({WORDS: [ids(i) for i in range(SMALL) if i not in {EOS, MORE_EOS}]}, ()),
    ({STOP: range(SMALL), MIN: 1}, (STOP, MIN)),
    ({STOP: range(SMALL)}, ()),
    ({WORDS: [ids(i) for i in range(50)], STOP: range(50, SMALL), MIN: 1}, (WORDS, STOP, MIN)),
    # A bias is finite: it makes a token unlikely, and no other legal.
    ({ALLOWED: ids(7), "logit_bias": {7: -float("inf")}}, ()),
    ({ALLOWED: ids(7), WORDS: [ids(7)], "logit_bias": {7: 100.0}}, (ALLOWED, WORDS)),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FakeEngineServer]:
    folder = tmp_path_factory.mktemp("model")
    write_model_folder(folder, vocab_size=SMALL, max_position_embeddings=MAX_MODEL_LEN, eos_token_id=EOS)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, MORE_EOS]}))
    async with FakeEngineServer.run(make_config(folder)) as running:
        yield running


@pytest.mark.parametrize(("sampling", "fields"), CASES, ids=lambda value: str(value)[:60])
async def test_constraints(server: FakeEngineServer, sampling: dict[str, Any], fields: tuple[str, ...]) -> None:
    """FAULTS B2."""
    call = server.generate([1], sampling=sampling)
    if not fields:
        (await server.core.next_request()).step(5, finish="length")
        assert list((await within(call)).outputs[0].token_ids) == [5]
        return
    failure = await failure_of(call)
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert failure.fields == tuple(f"input.sampling_params.{name}" for name in fields)
    assert all(name in failure.message for name in fields)
    assert server.core.idle
    await server.check_alive()
