"""A stop string ends the engine's request, and the result tells how far the engine ran past the match."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from harness.simulated import VOCABULARY, Simulated, within
from tokenwire import AsyncClient, FinishReason, SamplingParams
from tokenwire.text import TextClient, TextTokenizer
from tokenwire_server.simulated_device.formula import expected_tokens
from tokenwire_server.simulated_device.step_log import belongs

PROMPT = list(range(100, 228))
REQUESTS = 16


@pytest.fixture(scope="session")
def tokenizer() -> TextTokenizer:
    """Make a tokenizer in which id 7 is the text "7,"."""
    backend = Tokenizer(models.WordLevel({f"{token_id},": token_id for token_id in range(VOCABULARY)}, "0,"))
    backend.decoder = decoders.Fuse()
    return TextTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


@pytest.mark.parametrize("carrier", ["calls", "multiplex"])
async def test_a_match_ends_the_engine_s_request(simulated: Simulated, tokenizer: TextTokenizer, carrier: str) -> None:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncClient(simulated.address))
        text = TextClient(client, tokenizer)
        if carrier == "multiplex":
            text = text.over(await stack.enter_async_context(client.multiplex()))
        params = SamplingParams(ignore_eos=True, max_tokens=4000)
        info = await client.engine_info()
        assert info.vocab_size == VOCABULARY == tokenizer.vocab_size
        # Each request has tokens of its own, and stops at the text between its 20th and its 21st.
        prompts = [[*PROMPT, number] for number in range(REQUESTS)]
        outputs = [expected_tokens(prompt, 30, vocab_size=VOCABULARY) for prompt in prompts]
        calls = [
            text.complete(prompt, params, stop=f"{output[19]},{output[20]}", request_id=f"{carrier}-{number}")
            for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
        ]
        results = await within(asyncio.gather(*calls))
    await simulated.gone(*(result.request_id for result in results))
    for result, output in zip(results, outputs, strict=True):
        assert result.token_ids == output[:21]
        assert result.text == "".join(f"{token_id}," for token_id in output[:19])
        assert result.finish_reason is FinishReason.STOP
        assert result.usage.completion_tokens == 21
        assert result.overrun_tokens is not None
        # The last step of the prompt gives the first token, and each further step one.
        sampled = 1 + sum(
            step.computes(result.request_id) > 0
            and not any(belongs(internal, result.request_id) for internal in step.prefill)
            for step in simulated.steps()
        )
        # Steps that run until the abort reaches the engine sample some more, which nobody gets; far from 4,000.
        assert 21 + result.overrun_tokens <= sampled < 200
