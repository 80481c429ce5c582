"""The command line of `tokenwire serve`."""

import dataclasses
from typing import Any

import pytest

from tokenwire_server.config import ServerConfig
from tokenwire_server.process.arguments import parse


def test_a_model_alone_gets_every_default() -> None:
    arguments = parse(["some/model"])
    assert arguments.server == ServerConfig()
    assert arguments.server.address == "127.0.0.1:50051"
    assert arguments.engine.model == "some/model"
    assert not arguments.keep_tokenizer
    assert arguments.direct_path
    assert not arguments.simulated


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--host", "0.0.0.0"], "host", "0.0.0.0"),  # noqa: S104  # that is what an operator may ask for
        (["--port", "0"], "port", 0),
        (["--port=8000"], "port", 8000),
        (["--uds", "/tmp/socket"], "uds", "/tmp/socket"),  # noqa: S108  # nothing is written
        (["--drain-timeout", "2.5"], "drain_timeout", 2.5),
        (["--max-receive-message-bytes", "1000"], "max_receive_message_bytes", 1000),
        (["--max-send-message-bytes", "1000"], "max_send_message_bytes", 1000),
        (["--slow-reader-timeout", "5"], "slow_reader_timeout", 5.0),
    ],
)
def test_an_option_of_the_server(argv: list[str], name: str, value: Any) -> None:
    arguments = parse([*argv, "some/model"])
    assert getattr(arguments.server, name) == value
    assert arguments.engine.model == "some/model"


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--tensor-parallel-size", "2"], "tensor_parallel_size", 2),
        (["-tp", "2"], "tensor_parallel_size", 2),
        (["--data_parallel_size", "2"], "data_parallel_size", 2),
        (["--max-model-len=512"], "max_model_len", 512),
        (["--max-model-len=1k"], "max_model_len", 1000),
        (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
        (["--served-model-name", "a", "b"], "served_model_name", ["a", "b"]),
        (
            ["--override-generation-config", '{"max_new_tokens": 5}'],
            "override_generation_config",
            {"max_new_tokens": 5},
        ),
        (["--override-generation-config.max_new_tokens", "5"], "override_generation_config", {"max_new_tokens": 5}),
        (["--max-num-queued-reqs", "7"], "max_num_queued_reqs", 7),
    ],
)
def test_an_engine_flag_is_spelled_as_for_vllm_serve(argv: list[str], name: str, value: Any) -> None:
    assert getattr(parse(["some/model", *argv]).engine, name) == value


def test_keep_tokenizer() -> None:
    assert parse(["some/model", "--keep-tokenizer"]).keep_tokenizer


def test_ipv6_addresses_are_put_in_brackets() -> None:
    assert parse(["some/model", "--host", "::1", "--port", "1"]).server.address == "[::1]:1"


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["some/model", "--no-such-flag"],
        ["some/model", "--port", "x"],
        ["some/model", "--port", "-1"],
        ["some/model", "--port", "65536"],
        ["some/model", "--max-model-len", "x"],
        ["some/model", "--uds", "/tmp/socket", "--host", "127.0.0.1"],  # noqa: S108  # nothing is written
    ],
)
def test_a_bad_flag_is_one_line_and_exit_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(argv)
    assert caught.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("tokenwire serve: error: ")


@pytest.mark.parametrize(
    "argv",
    [
        ["some/model", "--drain-timeout", "-1"],
        ["some/model", "--drain-timeout", "nan"],
        ["some/model", "--slow-reader-timeout", "0"],
        ["some/model", "--max-receive-message-bytes", "0"],
        ["some/model", "--max-send-message-bytes", "2147483648"],
    ],
)
def test_a_number_that_makes_no_sense_is_one_line_and_exit_code_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(argv)
    assert caught.value.code == 2


@pytest.mark.parametrize("folder", ["/no/such/model", "./no-such-model"])
def test_a_folder_that_does_not_exist_is_one_line_and_exit_code_3(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse([folder])
    assert caught.value.code == 3
    assert capsys.readouterr().err == f"tokenwire: error: cannot load {folder}: the folder does not exist\n"


def test_the_help_names_each_default_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help=all"])
    text = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(ServerConfig):
        option = text.partition(f" --{field.name.replace('_', '-')} ")[2].partition(" --")[0]
        assert option.count("(default:") <= 1, option
        assert "None" not in option
    assert "(default: 50051)" in text
