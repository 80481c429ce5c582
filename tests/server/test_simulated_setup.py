import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tokenwire_server.simulated_device import SimulatedDeviceError, configure, parse, unsupported, write_model_folder
from tokenwire_server.simulated_device.step_log import Step, StepLogWriter, belongs, read


def engine_args(model: Path, **changes: Any) -> Any:
    values = {"additional_config": None, "num_gpu_blocks_override": None, "block_size": None}
    return SimpleNamespace(model=str(model), **(values | changes))


def test_configure_fills_in_the_engine_arguments(tmp_path: Path) -> None:
    args = engine_args(write_model_folder(tmp_path), additional_config={"own": 1}, block_size=32)
    configure(args, parse("step_ms=3,async_scheduling=on"))
    assert args.additional_config["own"] == 1
    assert args.additional_config["simulated_device"]["step_ms"] == 3.0
    assert json.loads(json.dumps(args.additional_config)) == args.additional_config
    assert args.distributed_executor_backend.endswith(".SimulatedExecutor")
    assert (args.async_scheduling, args.skip_tokenizer_init, args.load_format) == (True, True, "dummy")
    assert (args.num_gpu_blocks_override, args.block_size) == (65_536, 32)


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"enable_lora": True}, "--enable-lora"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size"),
        ({"speculative_config": {"method": "ngram"}}, "--speculative-config"),
        ({"kv_transfer_config": object()}, "--kv-transfer-config"),
    ],
)
def test_engine_arguments_for_a_real_device_are_refused(tmp_path: Path, changes: dict[str, Any], flag: str) -> None:
    with pytest.raises(SimulatedDeviceError, match=flag):
        configure(engine_args(write_model_folder(tmp_path), **changes), parse(""))


def test_eos_after_needs_an_eos_id(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, eos_token_id=None)
    with pytest.raises(SimulatedDeviceError, match="eos_after requires an eos_token_id"):
        configure(engine_args(folder), parse("eos_after=3"))
    (folder / "generation_config.json").write_text('{"eos_token_id": [5]}')
    configure(engine_args(folder), parse("eos_after=3"))


def test_a_step_log_that_cannot_be_written_is_refused_and_an_old_one_emptied(tmp_path: Path) -> None:
    args = engine_args(write_model_folder(tmp_path))
    with pytest.raises(SimulatedDeviceError, match="cannot be written: No such file or directory"):
        configure(args, parse(f"step_log={tmp_path}/missing/log"))
    log = tmp_path / "log"
    log.write_text("old\n")
    configure(args, parse(f"step_log={log}"))
    assert read(log) == []


PLAIN: dict[str, Any] = {
    "logprobs": 5,
    "prompt_logprobs": None,
    "temperature": 0.3,
    "bad_words": [],
    "structured_outputs": None,
}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({}, None),
        ({"structured_outputs": object()}, "structured_outputs"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"_bad_words_token_ids": [[1]]}, "bad_words"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"logit_bias": {1: 1.0}}, "logit_bias"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"prompt_logprob_token_ids": [[1]]}, "prompt_logprob_token_ids"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ],
)
def test_what_cannot_be_honoured_is_named(changes: dict[str, Any], field: str | None) -> None:
    assert unsupported(SimpleNamespace(**(PLAIN | changes))) == field


def test_the_step_log_reads_what_was_written_by_all_ranks(tmp_path: Path) -> None:
    steps = [
        Step(step=1, rank=rank, tokens={"a-00000000": 4}, prefill={"a-00000000": 4}, held=["a-00000000"], dropped=[])
        for rank in range(2)
    ]
    path = tmp_path / "log"
    for step in steps:
        writer = StepLogWriter(str(path))
        writer.write(step)
        writer.close()
    assert read(path) == steps
    assert steps[0].holds("a")
    assert steps[0].computes("a") == 4
    with path.open("ab") as file:
        file.write(b'{"step":')
    assert read(path) == steps


def test_internal_ids_belong_to_exactly_one_request() -> None:
    assert belongs("a", "a")
    assert belongs("a-0123abcd", "a")
    assert belongs("2_a-0123abcd", "a")
    assert not belongs("ab-0123abcd", "a")
    assert not belongs("a-b-0123abcd", "a")
