"""Stop strings of VllmEngine's requests: the engine's work ends with them, and the tokenizer is the model's own."""

import asyncio
import hashlib
import io
import zipfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as smg
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub
from vllm.config import VllmConfig
from vllm.v1.metrics.stats import PrefillStats

from fake_engine import FakeEngineServer, collect, failure_of, make_config, read, within
from harness.tokenizers import END, write_folder
from tokenwire.text import TextTokenizer
from tokenwire.v1 import generation_pb2 as pb
from tokenwire.v1.logprobs_pb2 import Logprobs
from tokenwire_server.config import ServerConfig
from tokenwire_server.conversion.outputs import Chunk
from tokenwire_server.errors import RequestError
from tokenwire_server.services.smg.responses import Answer
from tokenwire_server.services.smg.stop_strings import StopStrings
from tokenwire_server.services.smg.tokenizer import ModelTokenizer

each_form = pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_config(folder)
    (folder / "model.safetensors").write_bytes(b"weights")
    return write_folder(folder)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> TextTokenizer:
    return TextTokenizer.load(folder)


@pytest.fixture(scope="module")
def encode(tokenizer: TextTokenizer) -> Callable[[str], list[int]]:
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


# The parts


def stop_strings(tokenizer: TextTokenizer, *stop: str, **params: Any) -> StopStrings:
    return StopStrings(tokenizer, [], smg.SamplingParams(stop=stop, **params))


def test_a_match_ends_the_output_with_the_token_that_completes_it(
    tokenizer: TextTokenizer, encode: Callable[[str], list[int]]
) -> None:
    ids = encode("The quick brown fox jumps over")
    k = 2
    logprobs = Logprobs(
        logprobs=range(len(ids)),
        ranks=range(len(ids)),
        top_k=k,
        top_token_ids=range(k * len(ids)),
        top_logprobs=range(k * len(ids)),
    )
    output = pb.SequenceOutput(
        token_ids=ids, logprobs=logprobs, finish_reason=pb.FINISH_REASON_STOP, stop_token_id=ids[-1]
    )
    assert stop_strings(tokenizer, "never", "own f").cut(output) == "own f"
    kept = len(output.token_ids)
    assert list(output.token_ids) == ids[:kept]
    assert "own f" in tokenizer.decode(ids[:kept])
    assert "own f" not in tokenizer.decode(ids[: kept - 1])
    assert output.finish_reason == pb.FINISH_REASON_STOP
    assert not output.HasField("stop_token_id")
    assert len(output.logprobs.logprobs) == len(output.logprobs.ranks) == kept
    assert list(output.logprobs.top_token_ids) == list(range(k * kept))
    assert len(output.logprobs.top_logprobs) == k * kept


def test_a_match_across_outputs(tokenizer: TextTokenizer, encode: Callable[[str], list[int]]) -> None:
    ids = encode("one, two, three!")
    watch = stop_strings(tokenizer, "o, th")
    matched = [watch.cut(pb.SequenceOutput(token_ids=[token])) for token in ids]
    first = next(i for i, stop in enumerate(matched) if stop is not None)
    assert matched[first] == "o, th"
    assert "o, th" in tokenizer.decode(ids[: first + 1])
    assert "o, th" not in tokenizer.decode(ids[:first])


def test_sequences_are_looked_at_apart(tokenizer: TextTokenizer, encode: Callable[[str], list[int]]) -> None:
    watch = stop_strings(tokenizer, "quick")
    first, second = encode("The qui"), encode("ck brown")
    assert watch.cut(pb.SequenceOutput(index=0, token_ids=first)) is None
    assert watch.cut(pb.SequenceOutput(index=1, token_ids=second)) is None
    assert watch.cut(pb.SequenceOutput(index=0, token_ids=second)) == "quick"


def test_without_a_match_the_output_stays(tokenizer: TextTokenizer, encode: Callable[[str], list[int]]) -> None:
    output = pb.SequenceOutput(token_ids=encode("The quick"), finish_reason=pb.FINISH_REASON_LENGTH)
    before = pb.SequenceOutput.FromString(output.SerializeToString())
    assert stop_strings(tokenizer, "fox").cut(output) is None
    assert output == before


def test_min_tokens(tokenizer: TextTokenizer, encode: Callable[[str], list[int]]) -> None:
    ids = encode("one one one")
    output = pb.SequenceOutput(token_ids=ids)
    assert stop_strings(tokenizer, "one", min_tokens=len(ids) - 1).cut(output) == "one"
    assert list(output.token_ids) == ids


@pytest.mark.parametrize("skip", [False, True])
def test_special_tokens_are_text_where_they_are_not_skipped(tokenizer: TextTokenizer, skip: bool) -> None:
    end = tokenizer.encode(END, add_special_tokens=False)
    output = pb.SequenceOutput(token_ids=end)
    matched = stop_strings(tokenizer, END, skip_special_tokens=skip).cut(output)
    assert matched == (None if skip else END)


@each_form
def test_nothing_is_said_of_a_sequence_after_its_match(
    tokenizer: TextTokenizer, encode: Callable[[str], list[int]], stream: bool
) -> None:
    request = smg.GenerateRequest(stream=stream)
    answer = Answer(request, 2, stop_strings(tokenizer, "quick"), lambda _: None)
    first = list(answer.take(Chunk([pb.SequenceOutput(token_ids=encode("The quick"))])))
    assert first[-1].complete.matched_stop_str == "quick"
    assert list(answer.take(Chunk([pb.SequenceOutput(token_ids=encode(" quick brown"))]))) == []
    assert not answer.done


# The service


class Served(NamedTuple):
    server: FakeEngineServer
    stub: Any

    def generate(self, stop: list[str], *, stream: bool, n: int = 1, **fields: Any) -> Any:
        sampling = {"stop": stop, "n": n, "seed": 1, "skip_special_tokens": True}
        request = smg.GenerateRequest(
            tokenized={"input_ids": [1, 2, 3]}, sampling_params=sampling, stream=stream, **fields
        )
        return self.stub.Generate(request)


@pytest.fixture(scope="module")
def config(folder: Path) -> VllmConfig:
    return make_config(folder)


@pytest.fixture
async def served(config: VllmConfig) -> AsyncIterator[Served]:
    async with FakeEngineServer.run(config, server=ServerConfig(port=0, smg=True)) as server:
        yield Served(server, VllmEngineStub(server.channel))


CACHED = PrefillStats(num_prompt_tokens=3, num_cached_tokens=2, num_computed_tokens=1)


@each_form
async def test_a_match_frees_the_engine(served: Served, encode: Callable[[str], list[int]], stream: bool) -> None:
    call = served.generate(["own f"], stream=stream, request_id="a")
    answer = asyncio.ensure_future(collect(call))
    request = await served.server.core.next_request()
    *ids, last = encode("The quick brown f")
    request.step(*ids, prefill_stats=CACHED)
    request.step(last, *encode("ox jumps"))
    messages = await within(answer)
    complete = messages[-1].complete
    assert (complete.finish_reason, complete.matched_stop_str) == ("stop", "own f")
    assert complete.completion_tokens == len(ids) + 1
    assert complete.cached_tokens == 2
    sent = [token for message in messages for token in message.chunk.token_ids] + list(complete.output_ids)
    assert sent == [*ids, last]
    assert await served.server.core.next_abort() == [request.internal_id]
    await within(served.server.registry.idle())


@each_form
async def test_without_a_match_a_request_ends_as_it_does(
    served: Served, encode: Callable[[str], list[int]], stream: bool
) -> None:
    answer = asyncio.ensure_future(collect(served.generate(["never"], stream=stream)))
    request = await served.server.core.next_request()
    ids = encode("The quick")
    request.step(ids[0])
    request.step(*ids[1:], finish="length")
    messages = await within(answer)
    complete = messages[-1].complete
    assert (complete.finish_reason, complete.WhichOneof("matched_stop")) == ("length", None)
    sent = [token for message in messages for token in message.chunk.token_ids] + list(complete.output_ids)
    assert sent == ids


@each_form
async def test_a_request_goes_on_until_each_sequence_has_ended(
    served: Served, encode: Callable[[str], list[int]], stream: bool
) -> None:
    call = served.generate(["quick"], stream=stream, n=2)
    answer = asyncio.ensure_future(collect(call))
    first, second = await served.server.core.next_requests(2)
    first.step(*encode("The quick"), prefill_stats=CACHED)
    second.step(*encode("The lazy"), prefill_stats=CACHED)
    first.step(*encode(" brown"))
    assert [first.live, second.live] == [True, True]
    second.step(*encode(" quick"))
    completes = {m.complete.index: m.complete for m in await within(answer) if m.HasField("complete")}
    assert {complete.matched_stop_str for complete in completes.values()} == {"quick"}
    assert [completes[i].completion_tokens for i in (0, 1)] == [
        len(encode("The quick")),
        len(encode("The lazy")) + len(encode(" quick")),
    ]
    assert [completes[i].cached_tokens for i in (0, 1)] == [2, 2]
    await served.server.core.next_abort()
    assert [first.live, second.live] == [False, False]


async def test_an_abort_while_stop_strings_are_looked_for(served: Served, encode: Callable[[str], list[int]]) -> None:
    call = served.generate(["never"], stream=True, request_id="a")
    first = asyncio.ensure_future(read(call))
    request = await served.server.core.next_request()
    request.step(*encode("The"))
    await within(first)
    await within(served.stub.Abort(smg.AbortRequest(request_ids=["a"])))
    [message] = await collect(call)
    assert message.complete.finish_reason == "abort"


@pytest.mark.parametrize("stop", [[""], ["a"] * 1025, ["a" * 65_537], ["a" * 40_000, "b" * 40_000]], ids=len)
async def test_stop_strings_that_are_refused(served: Served, stop: list[str]) -> None:
    failure = await failure_of(served.generate(stop, stream=True).read())
    assert failure.code == grpc.StatusCode.INVALID_ARGUMENT
    assert failure.fields[0].startswith("sampling_params.stop")
    assert served.server.core.idle


async def test_the_tokenizers_files(served: Served, folder: Path, tmp_path: Path) -> None:
    chunks = await collect(served.stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
    archive = b"".join(chunk.data for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(archive).hexdigest()]
    assert max(len(chunk.data) for chunk in chunks) <= 65536
    with zipfile.ZipFile(io.BytesIO(archive)) as reader:
        assert "model.safetensors" not in reader.namelist()
        assert {"tokenizer.json", "tokenizer_config.json", "config.json"} <= set(reader.namelist())
        reader.extractall(tmp_path)
    assert TextTokenizer.load(tmp_path).encode("The quick") == TextTokenizer.load(folder).encode("The quick")


async def test_a_tokenizer_is_loaded_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Path] = []
    load = TextTokenizer.load

    def counting(path: Path) -> TextTokenizer:
        loaded.append(path)
        return load(path)

    monkeypatch.setattr(TextTokenizer, "load", counting)
    tokenizer = ModelTokenizer(str(folder), None)
    first, second = await asyncio.gather(tokenizer.load(), tokenizer.load())
    assert first is second is await tokenizer.load()
    assert loaded == [folder]


async def test_a_load_that_failed_is_tried_again(folder: Path, tmp_path: Path) -> None:
    tokenizer = ModelTokenizer(str(tmp_path), None)
    with pytest.raises(RequestError, match="no usable tokenizer: cannot load a tokenizer from"):
        await tokenizer.load()
    with pytest.raises(RequestError, match="no usable tokenizer: no tokenizer in"):
        await tokenizer.archive()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert (await tokenizer.load()).encode("The")


async def test_a_name_on_the_hub_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert (name, revision) == ("some/model", "main")
        assert "tokenizer*.json" in allow_patterns
        raise FileNotFoundError("the hub cannot be reached\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(RequestError, match=r"the hub cannot be reached$"):
        await ModelTokenizer("some/model", "main").load()
