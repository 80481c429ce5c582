"""The simulated device under the real AsyncLLM: tokens, step log, failures. One engine start per mode."""

import asyncio
import contextlib
import gc
import os
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import pytest_asyncio

from harness.steps import Steps
from tokenwire_server.simulated_device import configure, parse, step_log, write_model_folder
from tokenwire_server.simulated_device.formula import (
    TokenLogprobs,
    expected_logprobs,
    expected_prompt_logprobs,
    expected_tokens,
)
from tokenwire_server.simulated_device.step_log import Step

pytestmark = [pytest.mark.simulated, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

# Not imported outright: torch warns while it is imported, and here warnings are errors.
AsyncLLM = pytest.importorskip("vllm.v1.engine.async_llm").AsyncLLM
AsyncEngineArgs = pytest.importorskip("vllm.engine.arg_utils").AsyncEngineArgs
EngineDeadError = pytest.importorskip("vllm.v1.engine.exceptions").EngineDeadError
tokens_input = pytest.importorskip("vllm.inputs.engine").tokens_input
sampling_params = pytest.importorskip("vllm.sampling_params")

VOCABULARY = 32_000
EOS = 2
EOS_AFTER = 40
ERROR_PROMPT_ID = 31_999

_Result = TypeVar("_Result")


class Engine:
    """An AsyncLLM on the simulated device, and its step log."""

    def __init__(self, llm: Any, log: Path) -> None:
        self.llm = llm
        self.steps = Steps(log).read

    def steps_of(self, request_id: str) -> list[Step]:
        return [step for step in self.steps() if step.computes(request_id)]

    async def generate(self, request_id: str, prompt: list[int], rank: int | None = None, **params: Any) -> Any:
        """Run one request to its end and return the last output."""
        sampling = sampling_params.SamplingParams(
            detokenize=False, output_kind=sampling_params.RequestOutputKind.FINAL_ONLY, **params
        )
        outputs = self.llm.generate(tokens_input(prompt), sampling, request_id, data_parallel_rank=rank)
        return [output async for output in outputs][-1]

    async def tokens(self, request_id: str, prompt: list[int], **params: Any) -> list[int]:
        output = await bounded(self.generate(request_id, prompt, **params))
        return list(output.outputs[0].token_ids)

    async def gone(self, request_id: str) -> None:
        """Wait until the engine has told the device to drop the request."""
        await until(lambda: any(step_log.belongs(name, request_id) for step in self.steps() for name in step.dropped))


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("waited 10 s in vain")


async def bounded(wait: Awaitable[_Result]) -> _Result:
    async with asyncio.timeout(30):
        return await wait


@contextlib.asynccontextmanager
async def running(folder: Path, options: str, **arguments: Any) -> AsyncIterator[Engine]:
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    log = folder / "steps.jsonl"
    args = AsyncEngineArgs(
        model=str(write_model_folder(folder / "model", eos_token_id=EOS)),
        max_model_len=2048,
        max_num_batched_tokens=256,
        num_gpu_blocks_override=160,
        **arguments,
    )
    configure(args, parse(f"{options},step_log={log}"))
    engine = Engine(await asyncio.to_thread(AsyncLLM.from_engine_args, args), log)
    try:
        yield engine
    finally:
        context = engine.llm.engine_core.resources.ctx
        await asyncio.to_thread(engine.llm.shutdown, timeout=2)
        # vLLM leaves its ZMQ context to the garbage collector, which may come in a later test, and here warnings are
        # errors.
        context.destroy(linger=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del engine.llm
            await asyncio.sleep(0)
            gc.collect()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["off", "on"], ids=["sync", "async"])
async def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    options = f"step_ms=1,eos_after={EOS_AFTER},error_prompt_id={ERROR_PROMPT_ID},async_scheduling={request.param}"
    async with running(tmp_path_factory.mktemp("device"), options) as engine:
        yield engine


def expected(prompt: list[int], count: int, **options: Any) -> list[int]:
    options = {"eos_after": EOS_AFTER} | options
    return expected_tokens(prompt, count, vocab_size=VOCABULARY, eos_token_ids=(EOS,), **options)


def entries(logprobs: list[dict[int, Any]], token_ids: list[int], top: int) -> list[TokenLogprobs]:
    """Return vLLM's log probabilities in the form of the formula's."""
    found = []
    for token, at in zip(token_ids, logprobs, strict=True):
        best = sorted(at.items(), key=lambda item: item[1].rank)[:top]
        found.append(
            TokenLogprobs(
                token_id=token,
                logprob=at[token].logprob,
                rank=at[token].rank,
                top=tuple((candidate, value.logprob) for candidate, value in best),
            )
        )
    return found


async def test_concurrent_requests_get_the_tokens_of_the_formula(engine: Engine) -> None:
    prompts = [[100 + number, *range(number)] for number in range(1, 40)]
    results = await asyncio.gather(
        *(engine.tokens(f"exact-{number}", prompt, max_tokens=number) for number, prompt in enumerate(prompts, 1))
    )
    assert results == [expected(prompt, number) for number, prompt in enumerate(prompts, 1)]


async def test_eos_comes_at_its_length(engine: Engine) -> None:
    output = await bounded(engine.generate("eos", [5, 6], max_tokens=100))
    assert output.outputs[0].token_ids == expected([5, 6], 100)
    assert len(output.outputs[0].token_ids) == EOS_AFTER
    assert output.outputs[0].finish_reason == "stop"
    assert await engine.tokens("eos-late", [5, 6], max_tokens=100, min_tokens=60) == expected(
        [5, 6], 100, min_tokens=60
    )
    ignoring = await engine.tokens("eos-never", [5, 6], max_tokens=100, ignore_eos=True)
    assert ignoring == expected([5, 6], 100, ignore_eos=True)
    assert len(ignoring) == 100


async def test_stop_ids_work(engine: Engine) -> None:
    """FIELD_LOG 51."""
    stop = expected([8], 5)[4]
    output = await bounded(engine.generate("stop", [8], max_tokens=100, stop_token_ids=[stop]))
    assert output.outputs[0].token_ids == expected([8], 5)
    assert output.outputs[0].stop_reason == stop
    late = await engine.tokens("stop-late", [8], max_tokens=10, stop_token_ids=[stop], min_tokens=6)
    assert late == expected([8], 10, stop_token_ids=[stop], min_tokens=6)


async def test_a_long_prompt_is_computed_in_chunks(engine: Engine) -> None:
    prompt = list(range(1000, 1600))
    assert await engine.tokens("chunks", prompt, max_tokens=3) == expected(prompt, 3)
    steps = engine.steps_of("chunks")
    assert [step.computes("chunks") for step in steps][:3] == [256, 256, 88]
    assert [sum(step.prefill.values()) for step in steps][:4] == [256, 256, 88, 0]


async def test_a_prompt_seen_before_is_taken_from_the_prefix_cache(engine: Engine) -> None:
    prompt = list(range(2000, 2100))
    first = await bounded(engine.generate("cache-1", prompt, max_tokens=3))
    second = await bounded(engine.generate("cache-2", prompt, max_tokens=3))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 96)
    assert [step.computes("cache-2") for step in engine.steps_of("cache-2")][:2] == [4, 1]
    assert second.outputs[0].token_ids == first.outputs[0].token_ids == expected(prompt, 3)


async def test_sequences_of_a_seeded_request_differ(engine: Engine) -> None:
    output = await bounded(engine.generate("n", [9], max_tokens=4, n=3, seed=70))
    assert [list(sequence.token_ids) for sequence in output.outputs] == [
        expected([9], 4, seed=70 + index) for index in range(3)
    ]


async def test_logprobs_follow_the_formula(engine: Engine) -> None:
    # Together, so that one batch has rows of different widths.
    wide, narrow, _ = await bounded(
        asyncio.gather(
            engine.generate("logprobs-5", [11], max_tokens=9, logprobs=5),
            engine.generate("logprobs-1", [12], max_tokens=9, logprobs=1),
            engine.generate("logprobs-none", [13], max_tokens=9),
        )
    )
    for output, top, prompt in ((wide, 5, [11]), (narrow, 1, [12])):
        tokens = expected(prompt, 9)
        assert output.outputs[0].token_ids == tokens
        assert entries(output.outputs[0].logprobs, tokens, top) == expected_logprobs(tokens, top, vocab_size=VOCABULARY)
    # The sampled token is one more where its rank is outside the top 1.
    assert [len(at) for at in narrow.outputs[0].logprobs] == [1, 2, 2] * 3


async def test_prompt_logprobs_follow_the_formula_over_chunks(engine: Engine) -> None:
    prompt = list(range(3000, 3300))
    output = await bounded(engine.generate("prompt-logprobs", prompt, max_tokens=2, prompt_logprobs=2))
    assert output.outputs[0].token_ids == expected(prompt, 2)
    assert output.prompt_logprobs[0] is None
    assert entries(output.prompt_logprobs[1:], prompt[1:], 2) == expected_prompt_logprobs(
        prompt, 2, vocab_size=VOCABULARY
    )
    single = await bounded(engine.generate("prompt-logprobs-1", [3], max_tokens=2, prompt_logprobs=2))
    assert single.prompt_logprobs == [None]


async def test_no_step_holds_an_aborted_request_and_its_id_can_be_used_again_at_once(engine: Engine) -> None:
    running = asyncio.create_task(engine.generate("again", [14], max_tokens=1500, ignore_eos=True))
    await until(lambda: len(engine.steps_of("again")) >= 3)
    await engine.llm.abort("again")
    aborted = await bounded(running)
    assert aborted.outputs[0].finish_reason == "abort"
    assert await engine.tokens("again", [15], max_tokens=4) == expected([15], 4)
    await engine.gone("again")
    await engine.tokens("after", [16], max_tokens=2)
    assert not any(step.holds("again") for step in engine.steps_of("after"))


async def test_a_preempted_request_goes_on_where_it_was(engine: Engine) -> None:
    # 4 * 900 tokens in a cache of 2,560.
    prompts = [[20 + number, *range(100)] for number in range(4)]
    before = len(engine.steps())
    results = await asyncio.gather(
        *(
            engine.tokens(f"preempted-{number}", prompt, max_tokens=800, ignore_eos=True)
            for number, prompt in enumerate(prompts)
        )
    )
    assert results == [expected(prompt, 800, ignore_eos=True) for prompt in prompts]
    computed_again = sum(sum(step.prefill.values()) for step in engine.steps()[before:]) - 404
    assert computed_again > 0


async def test_a_request_that_asks_for_it_ends_with_error_and_others_do_not_notice(engine: Engine) -> None:
    failing, other = await bounded(
        asyncio.gather(
            engine.generate("error", [ERROR_PROMPT_ID, 1], max_tokens=9),
            engine.generate("other", [1, ERROR_PROMPT_ID], max_tokens=9),
        ),
    )
    assert other.outputs[0].token_ids == expected([1, ERROR_PROMPT_ID], 9)
    assert failing.outputs[0].finish_reason == "error"


async def test_a_step_fails_a_request_and_a_step_hangs_as_asked_and_shutdown_works(tmp_path: Path) -> None:
    async with running(tmp_path, "step_ms=0,error_request_at_step=3,hang_at_step=8") as engine:
        failed = await bounded(engine.generate("error", [1], max_tokens=9))
        assert failed.outputs[0].finish_reason == "error"
        assert await engine.tokens("fine", [1], max_tokens=3) == expected([1], 3, eos_after=None)
        hanging = asyncio.create_task(engine.generate("hangs", [1], max_tokens=9))
        await until(lambda: engine.steps()[-1].step == 8)
        done, _ = await asyncio.wait([hanging], timeout=0.5)
        assert not done
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
