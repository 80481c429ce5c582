"""`tokenwire bench` against a scripted server."""

import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner, Result

from tokenwire._bench import process_usage
from tokenwire._bench.recording import RequestRecord, Summary, gaps, times_to_first
from tokenwire._bench.workload import Lengths
from tokenwire._cli.app import app
from tokenwire.v1 import engine_info_pb2, generation_pb2, multiplex_pb2
from tokenwire.v1 import engine_service_pb2 as pb

VOCABULARY = 500
CONTEXT = 1000
MODES = ["unary", "stream", "multiplex"]


class Servicer:
    """Responds to every request with max_tokens tokens, one by one. `on_request` may abort it."""

    def __init__(self) -> None:
        self.inputs: list[generation_pb2.GenerationInput] = []
        self.on_request: Callable[[Any], None] = lambda _: None
        self._lock = threading.Lock()

    def get_engine_info(self, *_: Any) -> pb.GetEngineInfoResponse:
        info = engine_info_pb2.EngineInfo(model="fake", vocab_size=VOCABULARY, max_model_len=CONTEXT)
        return pb.GetEngineInfoResponse(info=info)

    def generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        tokens = range(self._take(request.input, context))
        return pb.GenerateResponse(outputs=[generation_pb2.SequenceOutput(token_ids=tokens)])

    def generate_stream(self, request: pb.GenerateStreamRequest, context: Any) -> Iterator[pb.GenerateStreamResponse]:
        for token in range(self._take(request.input, context)):
            yield pb.GenerateStreamResponse(outputs=[generation_pb2.SequenceOutput(token_ids=[token])])

    def multiplex(self, requests: Iterator[pb.MultiplexRequest], context: Any) -> Iterator[pb.MultiplexResponse]:
        for request in requests:
            handle = request.submit.handle
            for token in range(self._take(request.submit.input, context)):
                step = multiplex_pb2.MultiplexStep(handles=[handle], token_ids=[token])
                yield pb.MultiplexResponse(step=step)
            finish = multiplex_pb2.MultiplexFinish(
                handle=handle, finish_reason=generation_pb2.FINISH_REASON_LENGTH, last=True
            )
            yield pb.MultiplexResponse(step=multiplex_pb2.MultiplexStep(finished=[finish]))

    def handlers(self) -> grpc.GenericRpcHandler:
        info = grpc.unary_unary_rpc_method_handler(
            self.get_engine_info, pb.GetEngineInfoRequest.FromString, pb.GetEngineInfoResponse.SerializeToString
        )
        unary = grpc.unary_unary_rpc_method_handler(
            self.generate, pb.GenerateRequest.FromString, pb.GenerateResponse.SerializeToString
        )
        stream = grpc.unary_stream_rpc_method_handler(
            self.generate_stream, pb.GenerateStreamRequest.FromString, pb.GenerateStreamResponse.SerializeToString
        )
        multiplex = grpc.stream_stream_rpc_method_handler(
            self.multiplex, pb.MultiplexRequest.FromString, pb.MultiplexResponse.SerializeToString
        )
        methods: dict[str, Any] = {
            "GetEngineInfo": info,
            "Generate": unary,
            "GenerateStream": stream,
            "Multiplex": multiplex,
        }
        return grpc.method_handlers_generic_handler("tokenwire.v1.EngineService", methods)

    def _take(self, message: generation_pb2.GenerationInput, context: Any) -> int:
        with self._lock:
            self.inputs.append(message)
        self.on_request(context)
        return message.sampling_params.max_tokens


class Running:
    def __init__(self) -> None:
        self.servicer = Servicer()
        self._pool = ThreadPoolExecutor(16)
        self._server = grpc.server(self._pool)
        self._server.add_generic_rpc_handlers((self.servicer.handlers(),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait(10)

    def close(self) -> None:
        self.stop()
        self._pool.shutdown()


@pytest.fixture
def server() -> Iterator[Running]:
    running = Running()
    yield running
    running.close()


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


def report_of(*arguments: str) -> Any:
    result = bench(*arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("mode", MODES)
def test_table(server: Running, mode: str) -> None:
    result = bench(
        server.address, "--mode", mode, "--requests", "6", "--concurrency", "2", "--prompt-tokens", "5",
        "--output-tokens", "7",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = dict(line.split("  ", 1) for line in result.stdout.splitlines())
    rows = {name: value.strip() for name, value in rows.items()}
    assert list(rows) == [
        "mode", "requests", "throughput", "tokens", "time to first token", "inter-token", "end to end", "caller",
        "server",
    ]  # fmt: skip
    assert rows["mode"] == mode
    assert rows["requests"].startswith("6 completed in ")
    assert rows["tokens"] == "30 in, 42 out"
    assert (rows["inter-token"] == "not measured") == (mode == "unary")
    assert rows["server"].endswith(f"MiB (process {os.getpid()})")
    assert "µs CPU/token" in rows["caller"]
    assert result.stderr == ""


@pytest.mark.parametrize("mode", MODES)
def test_json(server: Running, mode: str) -> None:
    report = report_of(
        server.address, "--mode", mode, "--requests", "6", "--prompt-tokens", "5", "--output-tokens", "7",
        "--logprobs", "3",
    )  # fmt: skip
    assert report["target"] == server.address
    assert report["model"] == "fake"
    assert report["error"] is None
    assert report["workload"]["mode"] == mode
    assert report["requests_completed"] == report["requests_started"] == 6
    assert report["prompt_tokens"] == 30
    assert report["output_tokens"] == 42
    assert report["output_tokens_per_s"] == pytest.approx(42 / report["wall_s"])
    assert report["end_to_end_ms"]["p50"] <= report["end_to_end_ms"]["p99"] <= report["end_to_end_ms"]["max"]
    assert (report["time_to_first_token_ms"] is None) == (mode == "unary")
    for name in ("caller", "server"):
        assert report[name]["pid"] == os.getpid()
        assert report[name]["cpu_us_per_token"] > 0
        assert report[name]["memory_bytes"] > 0
    # One for the warm-up.
    assert len(server.servicer.inputs) == 7
    for message in server.servicer.inputs:
        assert len(message.prompt_token_ids) == 5
        assert max(message.prompt_token_ids) < VOCABULARY
        assert message.sampling_params.max_tokens == 7
        assert message.sampling_params.logprobs == 3
        assert message.sampling_params.ignore_eos


def test_json_file(server: Running, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    result = bench(server.address, "--requests", "1", "--json", str(file))
    assert result.exit_code == 0
    assert "1 completed" in result.stdout
    assert json.loads(file.read_text())["requests_completed"] == 1


def test_json_file_that_cannot_be_written(server: Running, tmp_path: Path) -> None:
    result = bench(server.address, "--requests", "1", "--json", str(tmp_path / "none" / "report.json"))
    assert result.exit_code == 1
    assert "cannot write" in result.stderr


def test_equal_seeds_send_equal_requests(server: Running) -> None:
    def sent(seed: str) -> list[tuple[list[int], int]]:
        server.servicer.inputs.clear()
        report_of(
            server.address, "--seed", seed, "--requests", "8", "--concurrency", "1", "--prompt-tokens", "4-9",
            "--output-tokens", "1-3",
        )  # fmt: skip
        return [
            (list(message.prompt_token_ids), message.sampling_params.max_tokens) for message in server.servicer.inputs
        ]

    first = sent("1")
    assert first == sent("1")
    assert first != sent("2")
    assert {len(prompt) for prompt, _ in first} <= set(range(4, 10))
    assert len({len(prompt) for prompt, _ in first}) > 1


def test_duration_and_rate(server: Running) -> None:
    report = report_of(server.address, "--duration", "0.5", "--rate", "60", "--output-tokens", "1")
    assert 5 < report["requests_completed"] < 80
    assert report["workload"]["concurrency"] is None
    assert report["workload"]["requests"] is None
    assert (
        report_of(server.address, "--duration", "0.5", "--concurrency", "1", "--output-tokens", "1")[
            "requests_completed"
        ]
        > 1
    )


def test_concurrency_is_kept(server: Running) -> None:
    running = threading.Semaphore(0)
    most = 0
    lock = threading.Lock()
    live = 0

    def hold(_: Any) -> None:
        nonlocal live, most
        with lock:
            live += 1
            most = max(most, live)
        running.acquire(timeout=0.02)
        with lock:
            live -= 1

    server.servicer.on_request = hold
    report_of(server.address, "--mode", "unary", "--requests", "12", "--concurrency", "3", "--warmup", "0")
    assert most == 3


def test_a_token_is_sent(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    server.servicer.on_request = lambda context: seen.append(dict(context.invocation_metadata()).get("authorization"))
    monkeypatch.setenv("TOKENWIRE_TARGET", server.address)
    assert bench("--requests", "3", "--warmup", "0", "--token", "secret", "--json", "-").exit_code == 0
    assert seen == ["Bearer secret"] * 3


def test_target_is_down(server: Running) -> None:
    server.stop()
    result = bench(server.address)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith(f"tokenwire: cannot reach {server.address}: ")
    assert len(result.stderr.splitlines()) == 1


def test_target_is_down_in_json(server: Running) -> None:
    server.stop()
    result = bench(server.address, "--json", "-")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["error"].startswith("cannot reach")
    assert report["requests_started"] == 0
    assert report["caller"] is None


@pytest.mark.parametrize("mode", ["unary", "stream"])
def test_target_refuses(server: Running, mode: str) -> None:
    server.servicer.on_request = lambda context: context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not this one")
    result = bench(server.address, "--mode", mode)
    assert result.exit_code == 1
    assert result.stderr == "tokenwire: INVALID_ARGUMENT: not this one\n"


@pytest.mark.parametrize("mode", MODES)
def test_target_dies_in_the_middle(server: Running, mode: str) -> None:
    def die(context: Any) -> None:
        if len(server.servicer.inputs) == 9:
            # Nothing is sent for this request: its call has ended before the handler goes on.
            ended = threading.Event()
            assert context.add_callback(ended.set)
            threading.Thread(target=server.stop).start()
            assert ended.wait(30)

    server.servicer.on_request = die
    result = bench(
        server.address, "--mode", mode, "--requests", "20", "--concurrency", "1", "--output-tokens", "4",
    )  # fmt: skip
    assert result.exit_code == 1
    assert result.stderr.startswith(f"tokenwire: stopped after 7 of 20 requests: cannot reach {server.address}: ")
    assert len(result.stderr.splitlines()) == 1
    assert "7 completed" in result.stdout
    assert "28 out" in result.stdout
    assert "end to end           p50" in result.stdout


def test_too_long_for_the_model(server: Running) -> None:
    result = bench(server.address, "--prompt-tokens", "990", "--output-tokens", "5-11")
    assert result.exit_code == 2
    assert result.stderr == "tokenwire: prompt and output of up to 1001 tokens exceed this model's context of 1000\n"


@pytest.mark.parametrize("text", ["", "-", "0", "a", "3-", "5-3", "-5", "1.5"])
def test_bad_lengths(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        Lengths.parse(text)
    result = bench("--output-tokens", text)
    assert result.exit_code == 2


@pytest.mark.parametrize("target", ["", "http://127.0.0.1:1"])
def test_a_target_that_is_none(target: str) -> None:
    result = bench(target)
    assert result.exit_code == 2
    assert "must be host:port or unix:path" in result.stderr


def test_server_of_another_machine_is_not_known() -> None:
    assert process_usage.find_listener("192.0.2.1:50051") is None
    assert process_usage.find_listener("127.0.0.1:1") is None
    assert process_usage.find_listener("unix:/no/such/socket") is None


def test_a_process_that_is_gone() -> None:
    for measure in (process_usage.cpu_seconds, process_usage.resident_bytes):
        assert measure(os.getpid()) > 0
        with pytest.raises(OSError, match=r".+"):
            measure(2**22 + 1)


def test_figures() -> None:
    record = RequestRecord(3)
    record.started = 10.0
    record.times.extend([10.5, 10.6, 11.0])
    assert times_to_first([record, RequestRecord(1)]) == [0.5]
    assert gaps([record, RequestRecord(1)]) == pytest.approx([0.1, 0.4])
    summary = Summary.of([0.004, 0.001, 0.002, 0.003])
    assert summary is not None
    assert (summary.p50, summary.max, summary.mean) == pytest.approx((2.5, 4.0, 2.5))
    assert Summary.of([]) is None
