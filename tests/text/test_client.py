"""TextClient over a scripted engine."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.text_engine import Engine
from harness.tokenizers import END
from tokenwire import (
    AsyncClient,
    ClientClosedError,
    EngineDeadError,
    FinishReason,
    InternalError,
    InvalidArgumentError,
    SamplingParams,
    UnreachableError,
    Usage,
)
from tokenwire.text import TextClient, TextTokenizer
from tokenwire.text._carrier import carrier_of

LIMIT = 20.0


def one_by_one(tokens: Sequence[int]) -> list[list[int]]:
    return [[token] for token in tokens]


@pytest.fixture
def story(tokenizer: TextTokenizer) -> list[list[int]]:
    return one_by_one(tokenizer.encode("The story ends here. END And more."))


async def read(text: TextClient, **options: Any) -> tuple[list[str], Any]:
    async with text.stream("x", **options) as pieces:
        return [piece async for piece in pieces], pieces.result


async def test_without_stop_strings(tokenizer: TextTokenizer, story: list[list[int]]) -> None:
    engine = Engine(story)
    text = TextClient(engine, tokenizer)
    pieces, streamed = await read(text)
    whole = await text.complete("x")
    assert "".join(pieces) == whole.text == "The story ends here. END And more."
    assert len(pieces) > 3
    assert streamed == whole
    assert (whole.finish_reason, whole.stop_reason, whole.overrun_tokens) == (FinishReason.LENGTH, None, 0)
    assert whole.usage == Usage(prompt_tokens=1, completion_tokens=len(story), cached_tokens=3)
    assert engine.aborts == 0


@pytest.mark.parametrize("overrun", [0, 1, 2])
async def test_a_stop_string_aborts(tokenizer: TextTokenizer, story: list[list[int]], overrun: int) -> None:
    engine = Engine(story, overrun=overrun)
    pieces, result = await read(TextClient(engine, tokenizer), stop="END")
    assert result.text == "".join(pieces) == "The story ends here. "
    assert (result.finish_reason, result.stop_reason) == (FinishReason.STOP, "END")
    assert tokenizer.decode(result.token_ids) == "The story ends here. END"
    assert result.usage == Usage(prompt_tokens=1, completion_tokens=len(result.token_ids), cached_tokens=3)
    assert result.overrun_tokens == overrun
    assert engine.aborts == 1
    assert engine.closed


async def test_complete_with_a_stop_string(tokenizer: TextTokenizer, story: list[list[int]]) -> None:
    text = TextClient(Engine(story), tokenizer)
    result = await text.complete("x", stop=["nothing", "END"], include_stop_str_in_output=True)
    assert result.text == "The story ends here. END"
    assert result.stop_reason == "END"


async def test_tokens_after_the_match_in_one_chunk(tokenizer: TextTokenizer, story: list[list[int]]) -> None:
    tokens = [token for chunk in story for token in chunk]
    engine = Engine([tokens])
    result = await TextClient(engine, tokenizer).complete("x", stop=["END"])
    assert result.text == "The story ends here. "
    assert result.overrun_tokens == len(tokens) - len(result.token_ids) > 0
    assert engine.aborts == 0  # it had ended


async def test_min_tokens_let_a_first_match_pass(tokenizer: TextTokenizer) -> None:
    tokens = tokenizer.encode("END END")
    first = len(tokenizer.encode("END"))
    text = TextClient(Engine(one_by_one(tokens)), tokenizer)
    result = await text.complete("x", SamplingParams(min_tokens=first), stop="END")
    assert result.text == "END "


async def test_a_stop_token(tokenizer: TextTokenizer) -> None:
    tokens = tokenizer.encode("the story")
    engine = Engine(one_by_one(tokens), finish_reason=FinishReason.STOP, stop_token_id=tokens[-1])
    text = TextClient(engine, tokenizer)
    result = await text.complete("x", stop="END")
    assert (result.text, result.stop_reason) == (tokenizer.decode(tokens[:-1]), tokens[-1])
    assert result == await text.complete("x")
    assert (await text.complete("x", include_stop_str_in_output=True)).text == "the story"


async def test_a_stop_string_longer_than_the_output(tokenizer: TextTokenizer, story: list[list[int]]) -> None:
    stop = "The story ends here. END And more. And then"
    result = await TextClient(Engine(story), tokenizer).complete("x", stop=stop)
    assert result.text == "The story ends here. END And more."
    assert (result.finish_reason, result.stop_reason) == (FinishReason.LENGTH, None)


async def test_an_abort_by_another(tokenizer: TextTokenizer, story: list[list[int]]) -> None:
    engine = Engine(story[:3], finish_reason=FinishReason.ABORT)
    result = await TextClient(engine, tokenizer).complete("x", stop="END")
    assert result.finish_reason is FinishReason.ABORT


@pytest.mark.parametrize("stop", ["", ["a", ""], [3]])
async def test_stop_strings_that_cannot_be(tokenizer: TextTokenizer, stop: Any) -> None:
    engine = Engine([])
    text = TextClient(engine, tokenizer)
    with pytest.raises(InvalidArgumentError) as caught:
        text.stream("x", stop=stop)
    assert [violation.field for violation in caught.value.field_violations] == [f"stop[{len(stop) - 1 if stop else 0}]"]
    with pytest.raises(InvalidArgumentError):
        await text.complete("x", stop=stop)
    assert not engine.prompts


@pytest.mark.parametrize(("stop", "field"), [(END, "stop[0]"), (["x", f"\n{END}"], "stop[1]")])
async def test_a_stop_string_that_special_tokens_hide(
    tokenizer: TextTokenizer, story: list[list[int]], stop: Any, field: str
) -> None:
    """FAULTS F14."""
    engine = Engine([*story[:3], [1], *story[3:]])
    text = TextClient(engine, tokenizer)
    for call in (text.complete("x", stop=stop), read(text, stop=stop)):
        with pytest.raises(InvalidArgumentError, match=r"stop_token_ids=\[1\], or skip_special_tokens=False") as caught:
            await call
        assert [violation.field for violation in caught.value.field_violations] == [field]
    assert not engine.prompts
    result = await text.complete("x", stop=END, skip_special_tokens=False)
    assert (result.finish_reason, result.stop_reason) == (FinishReason.STOP, END)
    assert len(result.token_ids) == 4


class Recorder(AsyncClient):
    """Records the options of calls and then refuses them."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1:1")
        self.calls: list[dict[str, Any]] = []

    async def generate(self, *_: Any, **options: Any) -> Any:
        self.calls.append(options)
        raise EngineDeadError("gone")

    def stream(self, *_: Any, **options: Any) -> Any:
        self.calls.append(options)
        return SimpleNamespace(request_id="r")

    async def abort(self, *_: Any, **options: Any) -> Any:
        self.calls.append(options)


async def test_a_call_has_its_timeout_and_metadata(tokenizer: TextTokenizer) -> None:
    """FAULTS D12."""
    options: Any = {"timeout": 5.0, "metadata": {"tenant": "a"}}
    async with Recorder() as client:
        with pytest.raises(EngineDeadError):
            await TextClient(client, tokenizer).complete("x", request_id="r", **options)
        started = carrier_of(client).start([1], SamplingParams(), request_id="r", **options)
        await started.abort()
    assert client.calls == [{"request_id": "r", **options}] * 2 + [{"metadata": {"tenant": "a"}}]


@pytest.mark.parametrize(
    ("name", "value", "instead"), [("timeout", 5.0, "max_time"), ("metadata", {}, r"multiplex\(\)")]
)
async def test_a_request_of_a_multiplex_has_none_of_its_own(
    tokenizer: TextTokenizer, name: str, value: Any, instead: str
) -> None:
    """FAULTS D12."""
    async with AsyncClient("127.0.0.1:1") as client:
        text = TextClient(client.multiplex(), tokenizer)
        for call in (text.complete("x", **{name: value}), read(text, **{name: value})):
            with pytest.raises(InvalidArgumentError, match=instead) as caught:
                await call
            assert [violation.field for violation in caught.value.field_violations] == [name]
        with pytest.raises(ClientClosedError):
            await text.complete("x", timeout=None, metadata=None)


async def test_sampling_params_of_another_type(tokenizer: TextTokenizer) -> None:
    """FAULTS D5."""
    params: Any = {"max_tokens": 5}
    with pytest.raises(InvalidArgumentError, match="must be SamplingParams"):
        await TextClient(Engine([]), tokenizer).complete("x", params)


async def test_bytes_are_no_prompt(tokenizer: TextTokenizer) -> None:
    engine = Engine([])
    with pytest.raises(InvalidArgumentError, match="prompt: must be a sequence, not b'hi'"):
        await TextClient(engine, tokenizer).complete(b"hi")
    assert not engine.prompts


async def test_several_outputs_are_refused(tokenizer: TextTokenizer) -> None:
    with pytest.raises(InvalidArgumentError, match="start a separate request for each"):
        await TextClient(Engine([]), tokenizer).complete("x", SamplingParams(n=2))


async def test_prompts(tokenizer: TextTokenizer, story: list[list[int]]) -> None:
    engine = Engine(story)
    text = TextClient(engine, tokenizer)
    messages = [{"role": "user", "content": "one"}]
    for prompt in ("one", messages, [5, 6]):
        await text.complete(cast("Any", prompt), request_id="mine", template_options=None)
    assert engine.prompts == [tokenizer.encode("one"), tokenizer.encode_chat(messages), [5, 6]]
    assert engine.options == [{"request_id": "mine"}] * 3


async def test_errors_come_through_once(tokenizer: TextTokenizer, story: list[list[int]]) -> None:
    engine = Engine(story, fails={2: EngineDeadError("gone")})
    stream = TextClient(engine, tokenizer).stream("x")
    assert await anext(stream)
    with pytest.raises(EngineDeadError):
        _ = [piece async for piece in stream]
    assert [piece async for piece in stream] == []
    assert engine.closed
    with pytest.raises(RuntimeError, match="no result"):
        _ = stream.result


@pytest.mark.parametrize("where", ["abort", "stream"])
async def test_a_match_outlives_a_failing_abort(tokenizer: TextTokenizer, story: list[list[int]], where: str) -> None:
    error = UnreachableError("gone")
    num_kept = len(tokenizer.encode("The story ends here"))
    engine = Engine(story, abort_error=error) if where == "abort" else Engine(story, fails={num_kept: error})
    result = await TextClient(engine, tokenizer).complete("x", stop="here")
    assert result.text == "The story ends "
    assert result.overrun_tokens is None
    assert engine.closed


async def test_leaving_early_ends_the_request(tokenizer: TextTokenizer, story: list[list[int]]) -> None:
    engine = Engine(story)
    text = TextClient(engine, tokenizer)
    async with text.stream("x", request_id="r") as pieces:
        assert pieces.request_id == "r"
        async for _ in pieces:
            break
    assert engine.closed
    engine.closed = 0
    async with text.stream("x"):
        pass  # not one piece was read
    assert engine.closed
    engine.closed = 0
    stream = text.stream("x")
    await stream.aclose()
    assert [piece async for piece in stream] == []
    assert len(engine.prompts) == 2  # never started
    with pytest.raises(RuntimeError, match="not been started"):
        _ = stream.request_id


async def test_leaving_at_the_last_piece_ends_the_abort(tokenizer: TextTokenizer, story: list[list[int]]) -> None:
    engine = Engine(story)
    async with asyncio.timeout(LIMIT):
        async with TextClient(engine, tokenizer).stream("x", stop="ends") as pieces:
            async for piece in pieces:
                if "story" in piece:
                    break
    assert engine.closed


async def test_a_stream_without_an_end(tokenizer: TextTokenizer) -> None:
    class Endless(Engine):
        def usage(self, _count: int) -> Any:
            return None

    with pytest.raises(InternalError, match="before the request"):
        await read(TextClient(Endless(one_by_one([5, 6])), tokenizer))


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_random_splits_make_no_difference(data: st.DataObject, tokenizer: TextTokenizer) -> None:
    words = st.sampled_from(["stop", " the", "END", "é", "😀", "東京", "\n", "e\u0301", "�"])
    written = "".join(data.draw(st.lists(words, min_size=1, max_size=12)))
    tokens = tokenizer.encode(written)
    start = data.draw(st.integers(0, len(written) - 1))
    stop = written[start : start + data.draw(st.integers(1, 6))]
    include = data.draw(st.booleans())
    chunks = []
    while tokens:
        size = data.draw(st.integers(1, len(tokens)))
        chunks.append(tokens[:size])
        tokens = tokens[size:]
    text = TextClient(Engine(chunks, overrun=data.draw(st.integers(0, 3))), tokenizer)
    pieces, result = await read(text, stop=stop, include_stop_str_in_output=include)
    found = written.find(stop)
    if not (result.stop_reason is None and written.endswith("�")):
        assert result.text == written[: found + (len(stop) if include else 0)]
        assert result.stop_reason == stop
    assert "".join(pieces) == result.text
    assert all(pieces)
    assert result.overrun_tokens is not None
