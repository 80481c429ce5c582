"""What goes wrong between the server and AsyncLLM: it is logged, and costs nobody else anything."""

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig, VllmConfig
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.stats import SchedulerStats

from fake_engine import FakeEngineCore, FakeEngineServer, collect, failure_of, make_config, make_llm, read, within
from tokenwire.v1 import engine_load_pb2
from tokenwire_server.engine import direct
from tokenwire_server.engine.stats import StatsRecorder


@pytest.mark.parametrize(
    ("error", "level"), [(RuntimeError("the socket is gone"), logging.ERROR), (EngineDeadError(), logging.DEBUG)]
)
async def test_an_abort_that_the_engine_does_not_take_is_logged(
    server: FakeEngineServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    level: int,
) -> None:
    async def fail(_: list[str]) -> None:
        raise error

    caplog.set_level(logging.DEBUG, "tokenwire_server")
    call = server.generate()
    request = await server.core.next_request()
    with monkeypatch.context() as patch:
        patch.setattr(server.core, "abort_requests_async", fail)
        call.cancel()
        await within(server.registry.idle())
        await server.engine.abort([request.internal_id])
    found = [record for record in caplog.records if record.name.startswith("tokenwire_server.engine")]
    assert {record.levelno for record in found} == {level}
    assert all(bool(record.exc_info) == (level == logging.ERROR) for record in found)
    del server.core.live[request.internal_id]
    await server.check_alive()


@pytest.mark.parametrize(
    ("error", "level"), [(RuntimeError("the socket is gone"), logging.ERROR), (EngineDeadError(), logging.DEBUG)]
)
async def test_a_remote_prefill_that_cannot_be_released_is_logged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    level: int,
) -> None:
    asked = asyncio.Event()

    async def fail(*_: object, **__: object) -> None:
        asked.set()
        raise error

    caplog.set_level(logging.DEBUG, "tokenwire_server")
    connector = KVTransferConfig(
        kv_connector="FetchingConnector", kv_role="kv_consumer", kv_connector_module_path="fake_engine.connector"
    )
    async with FakeEngineServer.run(make_config(tmp_path, kv_transfer_config=connector)) as server:
        monkeypatch.setattr(server.engine._llm, "notify_kv_transfer_request_rejected", fail)
        # A refusal is the caller's answer, whatever becomes of the release.
        call = server.generate(
            sampling={"max_tokens": 0}, kv_transfer_params_json='{"do_remote_prefill": true, "remote_port": 1}'
        )
        assert (await failure_of(call)).reason == "INVALID_FIELD"
        await within(asked.wait())
        await server.check_alive()
    [record] = [record for record in caplog.records if "remote prefill" in record.message]
    assert (record.levelno, bool(record.exc_info)) == (level, level == logging.ERROR)


async def test_a_callback_that_fails_at_the_end_of_a_step_leaves_the_others(
    server: FakeEngineServer, caplog: pytest.LogCaptureFixture
) -> None:
    processor = server.engine._direct
    assert processor is not None
    called: list[str] = []

    def fail() -> None:
        raise ZeroDivisionError

    def in_step(*_: object, **__: object) -> None:
        for callback in (fail, lambda: called.append("second")):
            assert processor.at_step_end(callback)

    # Between two steps there is nothing to wait for.
    assert not processor.at_step_end(fail)
    call = server.stream()
    request = await server.core.next_request()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processor, "_update_stats_from_output", in_step)
        request.step(5)
        assert list((await read(call)).outputs[0].token_ids) == [5]
    assert called == ["second"]
    assert "a callback at the end of an engine step failed" in caplog.text
    request.step(6, finish="length")
    assert [list(message.outputs[0].token_ids) for message in await collect(call)] == [[6]]


async def other_signature(monkeypatch: pytest.MonkeyPatch, _: Any) -> None:
    def process_outputs(self: Any, outputs: Any) -> None:
        del self, outputs

    expected = dict(direct._EXPECTED)
    expected[process_outputs] = ("self", "engine_core_outputs")
    monkeypatch.setattr(direct, "_EXPECTED", expected)


async def missing_field(monkeypatch: pytest.MonkeyPatch, _: Any) -> None:
    assert "new_token_ids" in EngineCoreOutput.__struct_fields__
    monkeypatch.setattr(direct, "_OUTPUT_FIELDS", {*direct._OUTPUT_FIELDS, "a_field_of_the_next_vllm"})


async def other_processor(_: pytest.MonkeyPatch, llm: Any) -> None:
    class Tracing(OutputProcessor):  # type: ignore[misc]  # vLLM has no types
        pass

    llm.output_processor.__class__ = Tracing


async def running_handler(_: pytest.MonkeyPatch, llm: Any) -> None:
    llm._run_output_handler()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (other_signature, "process_outputs takes ('self', 'outputs'), not ('self', 'engine_core_outputs')"),
        (missing_field, "EngineCoreOutput has no a_field_of_the_next_vllm"),
        (other_processor, "AsyncLLM has a Tracing"),
        (running_handler, "AsyncLLM has already started its output handler"),
    ],
    ids=["signature", "field", "processor", "handler"],
)
async def test_the_direct_path_is_left_alone_where_vllm_is_not_as_expected(
    vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch, change: Any, reason: str
) -> None:
    llm = await make_llm(vllm_config, FakeEngineCore())
    try:
        if llm.output_handler is not None:
            llm.output_handler.cancel()
            llm.output_handler = None
        assert direct.incompatibility(llm) is None
        await change(monkeypatch, llm)
        found = direct.incompatibility(llm)
        assert found is not None
        assert found.endswith(reason)
    finally:
        if llm.output_handler is not None:
            llm.output_handler.cancel()
        llm.shutdown()


def test_load_adds_up_counters_and_keeps_the_last_gauges(vllm_config: VllmConfig) -> None:
    recorder = StatsRecorder()
    loggers = {rank: recorder.logger_of_rank(vllm_config, rank) for rank in (1, 0)}
    for running, waiting, skipped, usage in ((3, 2, 1, 0.5), (1, 0, 0, 0.25)):
        scheduler = SchedulerStats(
            num_running_reqs=running, num_waiting_reqs=waiting, num_skipped_waiting_reqs=skipped, kv_cache_usage=usage
        )
        scheduler.prefix_cache_stats.queries = 10
        scheduler.prefix_cache_stats.hits = 4
        iteration: Any = SimpleNamespace(num_prompt_tokens=7, num_generation_tokens=5, num_preempted_reqs=1)
        loggers[1].record(scheduler, iteration)
        if running == 3:
            first = engine_load_pb2.EngineLoad()
            recorder.fill(first)
    loggers[1].record(None, None)
    message = engine_load_pb2.EngineLoad()
    recorder.fill(message)
    assert [rank.data_parallel_rank for rank in message.ranks] == [0, 1]
    idle, busy = message.ranks
    # A rank without a step so far says zero, not nothing.
    assert idle.HasField("generation_tokens")
    assert idle.generation_tokens == idle.num_running_reqs == 0
    assert (first.ranks[1].num_running_reqs, first.ranks[1].num_waiting_reqs) == (3, 3)
    assert (busy.num_running_reqs, busy.num_waiting_reqs, busy.kv_cache_usage) == (1, 0, 0.25)
    assert (busy.prompt_tokens, busy.generation_tokens, busy.num_preemptions) == (14, 10, 2)
    assert (busy.prefix_cache_queries, busy.prefix_cache_hits) == (20, 8)
