"""The sub-commands that call a server, against a scripted server."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import Int32Value, StringValue
from typer.testing import CliRunner, Result

from harness import COMMAND
from harness.terminal import Terminal
from harness.tokenizers import byte_level, write_folder
from tokenwire._cli.app import app
from tokenwire.v1 import engine_info_pb2, generation_pb2
from tokenwire.v1 import engine_service_pb2 as pb

LIMIT = 30.0
TOKENIZER = byte_level()
ANSWER = TOKENIZER.encode("There are 27 member states. END of it").ids


class Servicer:
    """Responds with `answer`, one token per message. With `hangs`, it does not finish until it is cancelled."""

    def __init__(self) -> None:
        self.inputs: list[generation_pb2.GenerationInput] = []
        self.metadata: list[tuple[str, str | bytes]] = []
        self.answer = ANSWER
        self.hangs = False
        self.model = ""
        self.health = 1
        self.aborted: list[str] = []
        self.cancelled = threading.Event()

    def _take(self, message: generation_pb2.GenerationInput, context: Any) -> generation_pb2.Usage:
        self.inputs.append(message)
        self.metadata = list(context.invocation_metadata())
        if message.model == "absent":
            context.abort(grpc.StatusCode.NOT_FOUND, "no model absent\nhere")
        return generation_pb2.Usage(prompt_tokens=len(message.prompt_token_ids), completion_tokens=len(self.answer))

    def generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        usage = self._take(request.input, context)
        output = generation_pb2.SequenceOutput(token_ids=self.answer, finish_reason=generation_pb2.FINISH_REASON_LENGTH)
        return pb.GenerateResponse(request_id=request.input.request_id, outputs=[output], usage=usage)

    def generate_stream(self, request: pb.GenerateStreamRequest, context: Any) -> Iterator[pb.GenerateStreamResponse]:
        usage = self._take(request.input, context)
        context.add_callback(self.cancelled.set)
        for position, token in enumerate(self.answer, 1):
            output = generation_pb2.SequenceOutput(token_ids=[token])
            response = pb.GenerateStreamResponse(request_id=request.input.request_id, outputs=[output])
            if position == len(self.answer) and not self.hangs:
                output.finish_reason = generation_pb2.FINISH_REASON_STOP
                response = pb.GenerateStreamResponse(outputs=[output], usage=usage)
            yield response
        while self.hangs and context.is_active():
            time.sleep(0.01)

    def abort(self, request: pb.AbortRequest, _context: Any) -> pb.AbortResponse:
        self.aborted += request.request_ids
        outcomes = {"live": pb.ABORT_OUTCOME_ABORTED, "done": pb.ABORT_OUTCOME_ALREADY_FINISHED}
        return pb.AbortResponse(
            results=[
                pb.AbortResult(request_id=name, outcome=outcomes.get(name, pb.ABORT_OUTCOME_NOT_FOUND))
                for name in request.request_ids
            ]
        )

    def get_engine_info(self, *_: Any) -> pb.GetEngineInfoResponse:
        info = engine_info_pb2.EngineInfo(
            model=self.model, vocab_size=TOKENIZER.get_vocab_size(), features=["multiplex"], tokenwire_version="1.2"
        )
        return pb.GetEngineInfoResponse(info=info)

    def check(self, _request: StringValue, _context: Any) -> Int32Value:
        return Int32Value(value=self.health)

    def watch(self, _request: StringValue, _context: Any) -> Iterator[Int32Value]:
        yield Int32Value(value=self.health)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tokenizer"), tokenizer=TOKENIZER)


@pytest.fixture
def servicer(folder: Path) -> Servicer:
    servicer = Servicer()
    servicer.model = str(folder)
    return servicer


@pytest.fixture
def target(servicer: Servicer, serve_threads: Callable[..., str]) -> str:
    return serve_threads(
        Generate=servicer.generate,
        GenerateStream=servicer.generate_stream,
        Abort=servicer.abort,
        GetEngineInfo=servicer.get_engine_info,
        Check=servicer.check,
        Watch=servicer.watch,
    )


def invoke(*arguments: str, target: str, given: str | None = None) -> Result:
    return CliRunner().invoke(app, arguments, input=given, env={"TOKENWIRE_TARGET": target})


def ids(tokens: list[int]) -> str:
    return " ".join(map(str, tokens))


def test_generate(servicer: Servicer, target: str) -> None:
    done = invoke("generate", "4", "5", "--max-tokens", "9", "--temperature", "0", target=target)
    assert (done.exit_code, done.stdout, done.stderr) == (0, ids(ANSWER) + "\n", "")
    (message,) = servicer.inputs
    assert list(message.prompt_token_ids) == [4, 5]
    assert message.sampling_params.max_tokens == 9
    assert message.sampling_params.HasField("temperature")
    assert not message.sampling_params.HasField("top_p")


@pytest.mark.parametrize("given", ["4 5\n", "[4, 5]", "4,5"])
def test_generate_reads_ids_from_the_input(servicer: Servicer, target: str, given: str) -> None:
    assert invoke("generate", target=target, given=given).exit_code == 0
    assert list(servicer.inputs[0].prompt_token_ids) == [4, 5]


def test_generate_streams(target: str) -> None:
    done = invoke("generate", "4", "--stream", target=target)
    assert (done.exit_code, done.stdout.split()) == (0, ids(ANSWER).split())


def test_generate_json(target: str) -> None:
    done = invoke("generate", "4", "--json", "--request-id", "mine", target=target)
    result = json.loads(done.stdout)
    assert result["request_id"] == "mine"
    assert result["outputs"][0]["token_ids"] == ANSWER
    assert result["outputs"][0]["finish_reason"] == "length"
    lines = invoke("generate", "4", "--json", "--stream", target=target).stdout.splitlines()
    deltas = [json.loads(line) for line in lines]
    assert [token for delta in deltas for output in delta["outputs"] for token in output["token_ids"]] == ANSWER


def test_any_sampling_parameter(servicer: Servicer, target: str) -> None:
    params = '{"n": 2, "logit_bias": {"7": -1.5}, "structured_outputs": {"json": {"type": "object"}}, "top_p": 0.5}'
    assert invoke("generate", "4", "--params", params, "--top-p", "0.25", target=target).exit_code == 0
    sent = servicer.inputs[0].sampling_params
    assert (sent.n, sent.top_p, dict(sent.logit_bias)) == (2, 0.25, {7: -1.5})
    assert json.loads(sent.structured_outputs.json) == {"type": "object"}


@pytest.mark.parametrize(
    ("arguments", "given", "message"),
    [
        (["generate", "4", "--params", "{"], None, "--params"),
        (["generate", "4", "--params", '{"top_q": 1}'], None, "SamplingParams has no 'top_q'"),
        (["generate", "4", "--params", '{"top_p": "x"}'], None, "$.top_p"),
        (["generate", "four"], None, "valid integer"),
        (["generate"], "four", "must contain only token ids"),
        (["health", "--client-cert", __file__], None, "go together"),
        (["health", "--target", "http://127.0.0.1:1"], None, "must be host:port or unix:path"),
        (["generate", "4", "--target", ""], None, "must be host:port or unix:path"),
        (["chat", "hi", "--target", "https://127.0.0.1:1"], None, "must be host:port or unix:path"),
        (["top", "http://127.0.0.1:1"], None, "must be host:port or unix:path"),
        (["top", ""], None, "must be host:port or unix:path"),
        (["abort"], None, "Missing argument"),
    ],
)
def test_wrong_arguments(target: str, arguments: list[str], given: str | None, message: str) -> None:
    done = invoke(*arguments, target=target, given=given)
    assert done.exit_code == 2
    assert message in done.stderr


def test_a_proxy_of_the_environment_is_used_only_if_asked_for(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FAULTS D2."""
    for name in ("grpc_proxy", "https_proxy", "no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{bound.getsockname()[1]}")
        assert invoke("info", target=target).exit_code == 0
        done = invoke("info", "--http-proxy", target=target)
    assert done.exit_code != 0
    assert f"cannot reach {target}" in done.stderr


def test_a_refusal_is_one_line(target: str) -> None:
    for command in (["generate", "4"], ["generate", "4", "--stream"]):
        done = invoke(*command, "--model", "absent", target=target)
        assert (done.exit_code, done.stdout) == (1, "")
        assert done.stderr == "tokenwire: NOT_FOUND: no model absent here\n"
    done = invoke("generate", "-1", target=target)
    assert done.exit_code == 2  # an option, to the shell
    done = invoke("generate", "--", "-1", target=target)
    assert done.exit_code == 1
    assert done.stderr.startswith("tokenwire: INVALID_ARGUMENT (INVALID_FIELD): input.prompt_token_ids[0]")


@pytest.mark.parametrize(
    "command", [["generate", "4"], ["info"], ["health"], ["top"], ["abort", "r"], ["chat", "x"]], ids=str
)
def test_nobody_listens(command: list[str]) -> None:
    done = invoke(*command, target="127.0.0.1:1")
    assert done.exit_code == 3
    assert done.stderr.startswith("tokenwire: cannot reach 127.0.0.1:1: ")
    assert done.stderr.count("\n") == 1


def test_waiting_for_nobody() -> None:
    done = invoke("health", "--wait", "0.5", target="127.0.0.1:1")
    assert done.exit_code == 3
    assert "cannot reach 127.0.0.1:1" in done.stderr


@pytest.mark.parametrize(
    "command", [["generate", "4"], ["info"], ["info", "--json"], ["health"], ["abort", "live"]], ids=str
)
def test_a_full_disk_is_one_line(target: str, command: list[str]) -> None:
    environment = os.environ | {"TOKENWIRE_TARGET": target}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [COMMAND, *command],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            check=False,
            timeout=LIMIT,
        )
    assert (done.returncode, done.stderr) == (1, "tokenwire: cannot write the output: No space left on device\n")


def test_the_token_is_sent(servicer: Servicer, target: str) -> None:
    for options in (["--token", "secret"], []):
        runner = CliRunner()
        environment = {"TOKENWIRE_TARGET": target, "TOKENWIRE_TOKEN": "secret"}
        assert runner.invoke(app, ["generate", "4", *options], env=environment).exit_code == 0
        assert ("authorization", "Bearer secret") in servicer.metadata


def test_tls_needs_a_server_that_speaks_it(target: str) -> None:
    assert invoke("health", "--tls", target=target).exit_code == 3


def test_info(target: str, folder: Path) -> None:
    lines = invoke("info", target=target).stdout.splitlines()
    assert lines[0].split() == ["model", str(folder)]
    assert json.loads(invoke("info", "--json", target=target).stdout)["features"] == ["multiplex"]


def test_health(servicer: Servicer, target: str) -> None:
    done = invoke("health", target=target)
    assert (done.exit_code, done.stdout) == (0, "SERVING\n")
    assert invoke("health", "--wait", "5", target=target).exit_code == 0
    servicer.health = 2
    done = invoke("health", target=target)
    assert (done.exit_code, done.stdout) == (1, "NOT_SERVING\n")
    done = invoke("health", "--wait", "0.3", target=target)
    assert done.exit_code == 1
    assert "NOT_SERVING" in done.stderr


def test_abort(servicer: Servicer, target: str) -> None:
    done = invoke("abort", "live", "done", target=target)
    assert (done.exit_code, done.stdout) == (0, "live ABORTED\ndone ALREADY_FINISHED\n")
    assert servicer.aborted == ["live", "done"]
    done = invoke("abort", "other", "--json", target=target)
    assert done.exit_code == 1
    assert json.loads(done.stdout) == [{"outcome": "not_found", "request_id": "other"}]


def test_chat_answers_one_message(servicer: Servicer, target: str) -> None:
    done = invoke("chat", "How many?", "--system", "Be brief.", "--seed", "3", target=target)
    assert (done.exit_code, done.stdout) == (0, TOKENIZER.decode(ANSWER[:-1]) + "\n")
    (message,) = servicer.inputs
    assert message.sampling_params.seed == 3
    prompt = TOKENIZER.decode(list(message.prompt_token_ids), skip_special_tokens=False)
    assert prompt == "<|start|>system\nBe brief.<|end|><|start|>user\nHow many?<|end|><|start|>assistant\n"


def test_chat_reads_a_piped_message_and_stops(servicer: Servicer, target: str, folder: Path) -> None:
    done = invoke("chat", "--stop", "END", "--tokenizer", str(folder), target=target, given="How many?")
    assert (done.exit_code, done.stdout) == (0, "There are 27 member states. \n")
    assert servicer.aborted == [servicer.inputs[0].request_id]


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("owner/model", [], "is not a folder on this machine: pass the tokenizer's folder"),
        ("", ["--tokenizer", "/absent"], "no tokenizer at /absent"),
        ("", ["--tokenizer", str(Path(__file__).parent)], "cannot load a tokenizer"),
        ("", ["--stop", ""], "stop[0]: must be a non-empty text"),
        ("", ["--system", "\udcff"], "prompt: must be text that UTF-8 can encode"),
    ],
)
def test_chat_errors(servicer: Servicer, target: str, model: str, options: list[str], message: str) -> None:
    servicer.model = model or servicer.model
    done = invoke("chat", "x", *options, target=target)
    assert done.exit_code == 1
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_ctrl_c_cancels_on_the_server(servicer: Servicer, target: str) -> None:
    servicer.hangs = True
    command: list[str | Path] = [COMMAND, "chat", "How many?", "--target", target]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(5) == b"There"
        process.send_signal(signal.SIGINT)
        assert servicer.cancelled.wait(LIMIT)
        _, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode == 130
    assert stderr == b""


@pytest.fixture
def terminal(target: str) -> Iterator[Terminal]:
    terminal = Terminal(COMMAND, "chat", "--target", target)
    yield terminal
    terminal.close()


def test_a_conversation_outlives_ctrl_c(servicer: Servicer, terminal: Terminal) -> None:
    servicer.hangs = True
    terminal.until("> ")
    terminal.type("How many?\n")
    terminal.until("There are")
    terminal.process.send_signal(signal.SIGINT)
    terminal.until("tokenwire: aborted")
    assert servicer.cancelled.wait(LIMIT)
    servicer.hangs = False
    terminal.until("> ")
    terminal.type("Really?\n")
    terminal.until("of")
    terminal.until("tokens/s")
    terminal.until("> ")
    terminal.type("And now?\n")
    terminal.until("tokens/s")
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.process.wait(LIMIT) == 0
    prompts = [
        TOKENIZER.decode(list(message.prompt_token_ids), skip_special_tokens=False) for message in servicer.inputs
    ]
    assert prompts[1] == "<|start|>user\nReally?<|end|><|start|>assistant\n"
    assert prompts[2].startswith(prompts[1] + "There are")


def test_help_tells_exit_codes_and_examples() -> None:
    for command in ("generate", "chat", "abort", "info", "health", "top"):
        done = CliRunner().invoke(app, [command, "--help"])
        assert "Exit codes" in done.stdout
        assert "TOKENWIRE_TARGET" in done.stdout
    assert "Examples:" in CliRunner().invoke(app, ["generate", "--help"]).stdout


def test_shell_completion() -> None:
    environment = os.environ | {"_TOKENWIRE_COMPLETE": "complete_bash", "COMP_WORDS": "tokenwire ge", "COMP_CWORD": "1"}
    done = subprocess.run([COMMAND], env=environment, capture_output=True, text=True, check=False, timeout=LIMIT)
    assert done.stdout.split() == ["generate"]
