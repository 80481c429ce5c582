import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

import tokenwire
from tokenwire import AbortOutcome, AbortResult, Client, HealthStatus, SamplingParams
from tokenwire.v1 import engine_info_pb2, generation_pb2
from tokenwire.v1 import engine_service_pb2 as pb

Serve = Callable[..., str]
LIMIT = 20.0


class Endless:
    """Handlers that never finish, and record when the call ends."""

    def __init__(self) -> None:
        self.started, self.ended = threading.Event(), threading.Event()

    def generate(self, _request: pb.GenerateRequest, context: grpc.ServicerContext) -> pb.GenerateResponse:
        self._begin(context)
        self.ended.wait(LIMIT)
        return pb.GenerateResponse()

    def stream(
        self, _request: pb.GenerateStreamRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateStreamResponse]:
        self._begin(context)
        yield pb.GenerateStreamResponse(outputs=[generation_pb2.SequenceOutput(token_ids=[1])])
        self.ended.wait(LIMIT)

    def _begin(self, context: grpc.ServicerContext) -> None:
        context.add_callback(self.ended.set)
        self.started.set()


def test_every_call(serve_threads: Serve) -> None:
    def generate(request: pb.GenerateRequest, _context: Any) -> pb.GenerateResponse:
        output = generation_pb2.SequenceOutput(token_ids=[request.input.sampling_params.max_tokens])
        return pb.GenerateResponse(request_id=request.input.request_id, outputs=[output])

    def stream(request: pb.GenerateStreamRequest, _context: Any) -> Iterator[pb.GenerateStreamResponse]:
        for token_id in request.input.prompt_token_ids:
            yield pb.GenerateStreamResponse(outputs=[generation_pb2.SequenceOutput(token_ids=[token_id])])

    def abort(request: pb.AbortRequest, _context: Any) -> pb.AbortResponse:
        result = pb.AbortResult(request_id=request.request_ids[0], outcome=pb.ABORT_OUTCOME_NOT_FOUND)
        return pb.AbortResponse(results=[result])

    def info(_request: Any, _context: Any) -> pb.GetEngineInfoResponse:
        return pb.GetEngineInfoResponse(info=engine_info_pb2.EngineInfo(model="m"))

    def check(_request: StringValue, _context: Any) -> Int32Value:
        return Int32Value(value=1)

    def watch(_request: StringValue, _context: Any) -> Iterator[Int32Value]:
        yield Int32Value(value=1)

    methods = {"Generate": generate, "GenerateStream": stream, "Abort": abort, "GetEngineInfo": info}
    target = serve_threads(**methods, Check=check, Watch=watch)
    with Client(target) as client:
        client.wait_ready(timeout=LIMIT)
        result = client.generate([1], SamplingParams(max_tokens=7), request_id="r", timeout=LIMIT)
        assert (result.request_id, result.token_ids) == ("r", [7])
        with client.stream([3, 4], timeout=LIMIT) as deltas:
            assert [delta.token_ids for delta in deltas] == [[3], [4]]
            assert list(deltas) == []
        assert client.abort(["x"], timeout=LIMIT) == [AbortResult("x", AbortOutcome.NOT_FOUND)]
        assert client.engine_info(timeout=LIMIT).model == "m"
        assert client.health(timeout=LIMIT) is HealthStatus.SERVING
        with client.watch_health(timeout=LIMIT) as statuses:
            assert list(statuses) == [HealthStatus.SERVING]
        assert client.target == target


def test_errors_are_the_same(serve_threads: Serve) -> None:
    def generate(_request: pb.GenerateRequest, context: grpc.ServicerContext) -> None:
        context.abort(grpc.StatusCode.NOT_FOUND, "no such model")

    with Client(serve_threads(Generate=generate)) as client:
        with pytest.raises(tokenwire.NotFoundError, match="no such model"):
            client.generate([1], timeout=LIMIT)
        with pytest.raises(tokenwire.InvalidArgumentError):
            client.stream([-1])


def leave_block(client: Client, _handler: Endless) -> None:
    with client.stream([1]) as deltas:
        next(deltas)


def leave_by_close(client: Client, _handler: Endless) -> None:
    deltas = client.stream([1])
    next(deltas)
    deltas.close()
    deltas.close()
    assert list(deltas) == []


def leave_by_break(client: Client, _handler: Endless) -> None:
    for _ in client.stream([1]):
        break
    gc.collect()


def leave_by_deadline(client: Client, handler: Endless) -> None:
    timeout = 0.1
    while not handler.started.is_set():  # on a slow machine the deadline comes before the call does
        timeout *= 2
        with pytest.raises(tokenwire.DeadlineExceededError):
            list(client.stream([1], timeout=timeout))


@pytest.mark.parametrize(
    "leave", [leave_block, leave_by_close, leave_by_break, leave_by_deadline], ids=lambda leave: leave.__name__
)
def test_leaving_the_stream_ends_the_call(serve_threads: Serve, leave: Callable[[Client, Endless], None]) -> None:
    handler = Endless()
    with Client(serve_threads(GenerateStream=handler.stream)) as client:
        leave(client, handler)
        assert handler.ended.wait(LIMIT)


@pytest.mark.parametrize("streams", [False, True])
def test_interrupt_ends_the_call(serve_threads: Serve, streams: bool) -> None:
    handler = Endless()
    with Client(serve_threads(Generate=handler.generate, GenerateStream=handler.stream)) as client:
        main = threading.main_thread().ident
        assert main is not None

        def interrupt() -> None:
            assert handler.started.wait(LIMIT)
            signal.pthread_kill(main, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            list(client.stream([1])) if streams else client.generate([1])
        thread.join(LIMIT)
        assert handler.ended.wait(LIMIT)


def test_closing_ends_the_calls_of_other_threads(serve_threads: Serve) -> None:
    handler = Endless()
    client = Client(serve_threads(Generate=handler.generate))
    raised: list[BaseException] = []

    def call() -> None:
        try:
            client.generate([1])
        except tokenwire.TokenwireError as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    assert handler.started.wait(LIMIT)
    client.close()
    thread.join(LIMIT)
    assert [type(error) for error in raised] == [tokenwire.ClientClosedError]
    client.close()
    with pytest.raises(tokenwire.ClientClosedError):
        client.generate([1])


def test_dropped_client_leaves_no_thread() -> None:
    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "tokenwire-client"]

    client = Client("127.0.0.1:1")
    assert threads()
    del client
    gc.collect()
    assert not threads()


def test_forgotten_client_lets_the_process_end() -> None:
    code = """
import tokenwire
client = tokenwire.Client("127.0.0.1:1")
try:
    client.engine_info()
except tokenwire.UnreachableError:
    print("unreachable")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "unreachable\n", "")
