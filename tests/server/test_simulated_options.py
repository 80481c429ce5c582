from pathlib import Path

import pytest

from tokenwire_server.simulated_device import SimulatedDeviceError, SimulatedDeviceOptions, parse


def test_an_empty_text_means_all_defaults() -> None:
    assert parse("") == SimulatedDeviceOptions()
    assert SimulatedDeviceOptions().step_ms == 10.0


def test_every_option_is_read() -> None:
    text = (
        "step_ms=0, prefill_us_per_token=2.5,eos_after=7,async_scheduling=on,fail_at_step=9,"
        "error_request_at_step=3,error_prompt_id=0,step_log=/logs/steps.jsonl"
    )
    assert parse(text) == SimulatedDeviceOptions(
        step_ms=0.0,
        prefill_us_per_token=2.5,
        eos_after=7,
        async_scheduling=True,
        fail_at_step=9,
        error_request_at_step=3,
        error_prompt_id=0,
        step_log="/logs/steps.jsonl",
    )


def test_the_prefill_rate_is_the_other_way_to_say_it() -> None:
    assert parse("prefill_tokens_per_s=20000").prefill_us_per_token == 50.0


def test_a_relative_step_log_becomes_absolute() -> None:
    assert parse("step_log=steps.jsonl").step_log == str(Path.cwd() / "steps.jsonl")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed=9", "unknown simulated device option 'speed'; known: step_ms, "),
        ("step_ms", "simulated device option 'step_ms': expected name=value"),
        ("step_ms=1,", "simulated device option '': expected name=value"),
        ("step_ms=1,step_ms=1", "simulated device option 'step_ms' is given twice"),
        ("step_ms=fast", "simulated device option step_ms=fast: expected a number, 0 or more"),
        ("step_ms=-1", "simulated device option step_ms=-1: expected a number, 0 or more"),
        ("step_ms=nan", "simulated device option step_ms=nan: expected a number, 0 or more"),
        ("step_ms=inf", "simulated device option step_ms=inf: expected a number, 0 or more"),
        ("prefill_tokens_per_s=0", "simulated device option prefill_tokens_per_s=0: expected a number above 0"),
        ("eos_after=0", "simulated device option eos_after=0: expected an integer, 1 or more"),
        ("hang_at_step=1.5", "simulated device option hang_at_step=1.5: expected an integer, 1 or more"),
        ("error_prompt_id=-3", "simulated device option error_prompt_id=-3: expected a token id"),
        ("async_scheduling=yes", "simulated device option async_scheduling=yes: expected on or off"),
        ("step_log=", "simulated device option step_log=: expected the path of a file"),
        (
            "prefill_us_per_token=1,prefill_tokens_per_s=1",
            "prefill_us_per_token and prefill_tokens_per_s are mutually exclusive",
        ),
        (
            "fail_at_step=1,hang_at_step=2",
            "fail_at_step and hang_at_step are mutually exclusive: the first one ends the engine",
        ),
        (
            "fail_at_step=4,error_request_at_step=4",
            "error_request_at_step=4 is never reached: the engine ends at step 4",
        ),
    ],
)
def test_what_makes_no_sense_is_one_clear_line(text: str, message: str) -> None:
    with pytest.raises(SimulatedDeviceError) as refusal:
        parse(text)
    assert str(refusal.value).startswith(message)
    assert "\n" not in str(refusal.value)
