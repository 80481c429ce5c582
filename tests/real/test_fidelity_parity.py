"""What the project is for: the answers are those of vLLM's own servers, on the same model with the same engine flags.

A coordinator is the tokenizer, Generate and the detokenizer; it must say what /v1/chat/completions says. Generate itself
must say what /inference/v1/generate says, field by field.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from harness.vllm_http import VllmServer, vllm_server
from tokenwire import AsyncClient, FinishReason, Logprobs, RepetitionDetectionParams, SamplingParams, SequenceOutput

# The first test pays for the starts and for all answers.
pytestmark = pytest.mark.timeout(400)

QUESTION = "How many countries are in the European Union?"  # what the fixture `prompt` asks
MEMBER = 4028  # " member", which is in the answer to the question
TOP = 3

# Question, and what both are asked for.
CHATS: dict[str, tuple[str, dict[str, Any]]] = {
    "eos": (QUESTION, {"temperature": 0.0, "max_tokens": 64}),
    "length": ("Tell me a long story about a fox and a bear.", {"temperature": 0.0, "max_tokens": 16}),
    "stop token": (QUESTION, {"temperature": 0.0, "max_tokens": 64, "stop_token_ids": [MEMBER]}),
    "beyond eos": ("Say yes.", {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}),
    "min_tokens": ("Say yes.", {"temperature": 0.0, "max_tokens": 12, "min_tokens": 8}),
    "penalties": (
        "Count from one to fifty.",
        {"temperature": 0.0, "max_tokens": 12, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    ),
    "unset": ("Name a colour.", {"seed": 7, "max_tokens": 12}),
}

# Each field explicit, at vLLM's default unless a case says otherwise.
EXPLICIT: dict[str, Any] = {
    "n": 1,
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "seed": 11,
    "max_tokens": 8,
    "min_tokens": 0,
    "stop_token_ids": [],
    "ignore_eos": False,
    "logprobs": TOP,
    "skip_reading_prefix_cache": False,
}
GENERATES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "eos": {"max_tokens": 64},
    "stop token": {"max_tokens": 64, "stop_token_ids": [MEMBER, 7]},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "several": {"temperature": 1.0, "n": 3, "max_tokens": 5},
    "penalties": {"presence_penalty": 0.3, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {MEMBER: 5.0, 339: -100.0}},
    "allowed": {"allowed_token_ids": [34, 39, MEMBER], "temperature": 1.0},
    "min_tokens": {"min_tokens": 6, "ignore_eos": True},
    "repetition": {
        "allowed_token_ids": [MEMBER],
        "repetition_detection": {"max_pattern_size": 2, "min_pattern_size": 1, "min_count": 4},
    },
    "prompt_logprobs": {"prompt_logprobs": 2, "max_tokens": 2, "skip_reading_prefix_cache": True},
    "no logprobs": {"logprobs": None, "max_tokens": 4},
    "logprob_token_ids": {"logprob_token_ids": [5, MEMBER, 34], "logprobs": None, "max_tokens": 4},
}
# What a server without the tokenizer may see differently.
WITHOUT_TOKENIZER = ["greedy", "eos", "sampled", "prompt_logprobs"]


@pytest.fixture(scope="module")
def answers(
    vllm: VllmServer, arguments: list[str], prompt: list[int], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What vLLM's servers answer: `vllm serve`, which has the tokenizer, and `vllm serve --tokens-only`.

    They start together, which takes little longer than one of them.
    """
    with vllm_server([*arguments, "--tokens-only"], tmp_path_factory.mktemp("vllm") / "log") as tokens_only:
        found = {"tokens_only": generate_all(tokens_only.client, prompt, WITHOUT_TOKENIZER)}
    vllm.wait_ready()
    found["ordinary"] = generate_all(vllm.client, prompt, GENERATES)
    found["chats"] = {
        name: answer(
            vllm.client,
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": question}],
                "logprobs": True,
                "top_logprobs": TOP,
                "return_tokens_as_token_ids": True,
                **fields,
            },
        )
        for name, (question, fields) in CHATS.items()
    }
    return found


def generate_all(client: Any, prompt: list[int], names: Iterable[str]) -> dict[str, Any]:
    path = "/inference/v1/generate"
    return {
        name: answer(client, path, {"token_ids": prompt, "sampling_params": EXPLICIT | GENERATES[name]})
        for name in names
    }


def answer(client: Any, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.is_success, response.text
    content: dict[str, Any] = response.json()
    return content


@pytest.mark.parametrize("name", CHATS)
async def test_tokenizer_generate_detokenizer_is_chat_completions(
    client: AsyncClient, answers: dict[str, Any], tokenizer: Any, encode: Callable[[str], list[int]], name: str
) -> None:
    question, fields = CHATS[name]
    expected = answers["chats"][name]
    [choice] = expected["choices"]
    result = await client.generate(encode(question), SamplingParams(**fields, logprobs=TOP))
    [output] = result.outputs
    # vLLM leaves a stop token out of the text.
    ended = output.finish_reason is FinishReason.STOP
    shown = output.token_ids[:-1] if ended else output.token_ids
    assert tokenizer.decode(shown, skip_special_tokens=True) == choice["message"]["content"]
    assert (output.finish_reason, output.stop_token_id) == (choice["finish_reason"], choice["stop_reason"])
    assert result.usage.prompt_tokens == expected["usage"]["prompt_tokens"]
    assert result.usage.completion_tokens == expected["usage"]["completion_tokens"]
    logprobs = output.logprobs
    assert logprobs is not None
    entries = choice["logprobs"]["content"]
    assert [f"token_id:{token}" for token in output.token_ids] == [entry["token"] for entry in entries]
    assert logprobs.logprobs == pytest.approx([entry["logprob"] for entry in entries], abs=1e-5)
    for position, entry in enumerate(entries):
        theirs = {int(top["token"].removeprefix("token_id:")): top["logprob"] for top in entry["top_logprobs"]}
        assert_top(logprobs, position, output, theirs)


def assert_top(logprobs: Logprobs, position: int, output: SequenceOutput, theirs: dict[int, float]) -> None:
    """Compare with vLLM's further ids: the token itself, and the best ones up to three in all."""
    ours = dict(logprobs.top(position))
    assert len(ours) == len(theirs) == TOP
    ours[output.token_ids[position]] = logprobs.logprobs[position]
    # JSON has no infinity, so theirs ends at -9999.
    assert {token: max(ours[token], -9999.0) for token in theirs} == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize(
    ("server_kind", "name"),
    [*(("ordinary", name) for name in GENERATES), *(("tokens_only", name) for name in WITHOUT_TOKENIZER)],
)
async def test_generate_is_inference_v1_generate(
    client: AsyncClient, answers: dict[str, Any], prompt: list[int], server_kind: str, name: str
) -> None:
    """FIELD_LOG 46."""
    fields = EXPLICIT | GENERATES[name]
    expected = answers[server_kind][name]
    ours = dict(fields)
    if "repetition_detection" in ours:
        ours["repetition_detection"] = RepetitionDetectionParams(**ours["repetition_detection"])
    result = await client.generate(prompt, SamplingParams(**ours))
    assert len(result.outputs) == len(expected["choices"]) == fields["n"]
    for output, choice in zip(result.outputs, expected["choices"], strict=True):
        assert output.index == choice["index"]
        assert output.token_ids == choice["token_ids"]
        assert output.finish_reason == choice["finish_reason"]
        stop = choice["stop_reason"]
        if (server_kind, name) == ("tokens_only", "eos"):
            # That server knows of no EOS, and takes it for a stop token.
            assert stop == 2
            stop = None
        # vLLM tells a detected repetition as a stop reason too.
        assert output.stop_token_id == (stop if isinstance(stop, int) else None)
        assert_logprobs(output, choice, fields)
        spans = [(span.version, span.start, span.end) for span in output.weight_versions]
        assert spans == [(span["version"], span["start"], span["end"]) for span in choice["weight_versions"]]
        assert choice["routed_experts"] is choice["sampling_mask"] is None
        assert (output.routed_experts, output.sampling_mask) == (None, None)
    assert result.usage.prompt_tokens == expected["usage"]["prompt_tokens"] == len(prompt)
    assert result.usage.completion_tokens == expected["usage"]["completion_tokens"]
    assert (result.kv_transfer_params_json, result.ec_transfer_params_json) == (None, None)
    assert (expected["kv_transfer_params"], expected["ec_transfer_params"]) == (None, None)
    assert_prompt_logprobs(result.prompt_logprobs, expected["prompt_logprobs"], fields, prompt)


def assert_logprobs(output: SequenceOutput, choice: dict[str, Any], fields: dict[str, Any]) -> None:
    logprobs = output.logprobs
    if fields["logprobs"] is None:
        # Theirs are left out for logprob_token_ids too.
        assert choice["logprobs"] is None
        assert (logprobs is None) == ("logprob_token_ids" not in fields)
        return
    assert logprobs is not None
    entries = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in entries] == output.token_ids
    assert logprobs.logprobs == pytest.approx([entry["logprob"] for entry in entries], abs=1e-5)
    for position, entry in enumerate(entries):
        own, *others = entry["top_logprobs"]
        assert own["token_id"] == output.token_ids[position]
        assert_top(logprobs, position, output, {top["token_id"]: top["logprob"] for top in (own, *others)})
        # Where others are as likely, theirs is a place among them and ours the engine's own, the last of them.
        tied = any(top["logprob"] == own["logprob"] for top in others)
        rank = logprobs.ranks[position]
        assert rank == entry["rank"] or (tied and rank > entry["rank"])


def assert_prompt_logprobs(found: Any, expected: Any, fields: dict[str, Any], prompt: list[int]) -> None:
    if "prompt_logprobs" not in fields:
        assert found is expected is None
        return
    assert isinstance(found.logprobs, list)
    first, *rows = expected
    assert first is None
    assert (found.offset, len(found.logprobs)) == (1, len(rows))
    k = fields["prompt_logprobs"]
    for position, (token, row) in enumerate(zip(prompt[1:], rows, strict=True)):
        own = row[str(token)]
        assert found.logprobs[position] == pytest.approx(own["logprob"], abs=1e-5)
        assert found.ranks[position] == own["rank"]
        ranked = {int(other): entry["logprob"] for other, entry in row.items() if entry["rank"] <= k}
        ids = found.top_token_ids[position * k : (position + 1) * k]
        values = found.top_logprobs[position * k : (position + 1) * k]
        assert dict(zip(ids, values, strict=True)) == pytest.approx(ranked, abs=1e-5)
