"""Random messages of any type, and a server that must stand them."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from vllm.config import VllmConfig

from fake_engine.core import MAX_MODEL_LEN, MAX_NUM_SEQS, VOCAB_SIZE
from fake_engine.failures import Failure
from fake_engine.server import FakeEngineServer, within
from tokenwire._contract import ERROR_DOMAIN, Reason

_T = TypeVar("_T")

SOAK_EXAMPLES = int(os.environ.get("TOKENWIRE_SOAK_EXAMPLES", "0"))
"""Examples of each test in `make soak`, with new seeds each time; 0: fewer, and the same ones each time."""


def examples(count: int) -> settings:
    """Return hypothesis's settings for a test with `count` examples."""
    return settings(
        max_examples=SOAK_EXAMPLES or count,
        derandomize=not SOAK_EXAMPLES,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


_EDGES = sorted(
    {0, 1, 2, 5, MAX_NUM_SEQS, MAX_NUM_SEQS + 1, MAX_MODEL_LEN - 1, MAX_MODEL_LEN, VOCAB_SIZE - 1, VOCAB_SIZE}
)
_DEEP = '{"a":' * 2000 + "1" + "}" * 2000
_JSON = st.sampled_from(["{}", '{"a": [1, {"b": null}]}', "[]", "", '{"a": 1e999}', '{"a": 1, "a": 2}', _DEEP])
_TEXT = st.sampled_from(["", "a", "b", "a b", "é", "\0", "x" * 2000]) | st.text(max_size=20)
_DOUBLE = st.sampled_from([0.0, 1.0, -1.0, 0.5, 2.0, 1e-300, 1e308, float("inf"), float("-inf"), float("nan")])

_ESSENTIAL = {"input", "submit", "prompt_token_ids", "sampling_params"}
"""Fields without which a request is refused at once, or which hold most of what can be wrong; most messages have them."""


def _integers(low: int, high: int) -> st.SearchStrategy[int]:
    edges = [*_EDGES, low, high, *([-1, -2] if low < 0 else [2**31])]
    return st.sampled_from(edges) | st.integers(low, high)


_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_INT32: _integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: _integers(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: _integers(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: _integers(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: _DOUBLE | st.floats(0, 2) | st.floats(),
    FieldDescriptor.CPPTYPE_FLOAT: _DOUBLE.filter(lambda v: abs(v) < 1e38 or v != v or abs(v) == float("inf")),  # noqa: PLR0124  # NaN
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(-1, 9),
}
_GOOD_PROMPT = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=8)
_ANY_PROMPT = st.lists(_SCALARS[FieldDescriptor.CPPTYPE_UINT32], max_size=MAX_MODEL_LEN + 2)


def _mostly(usual: st.SearchStrategy[_T], other: st.SearchStrategy[_T]) -> st.SearchStrategy[_T]:
    return st.sampled_from([usual] * 7 + [other]).flatmap(lambda strategy: strategy)


def messages(descriptor: Descriptor) -> st.SearchStrategy[Any]:
    """Return messages of a type: few fields set at a time in most, so that the first bad one does not hide the others."""
    return st.deferred(lambda: _messages(descriptor))


def _messages(descriptor: Descriptor) -> st.SearchStrategy[Any]:
    fields = {field.name: _values(field) for field in descriptor.fields}
    make = GetMessageClass(descriptor)
    if not fields:
        return st.just(make())
    essential = {name: values for name, values in fields.items() if name in _ESSENTIAL}
    few = st.lists(st.sampled_from(sorted(fields)), max_size=2, unique=True).flatmap(
        lambda names: st.fixed_dictionaries(essential | {name: fields[name] for name in names})
    )
    return _mostly(few, st.fixed_dictionaries({}, optional=fields)).map(lambda values: make(**values))


def _values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.name == "prompt_token_ids":
        return _mostly(_GOOD_PROMPT, _ANY_PROMPT)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (_one(entry) for entry in field.message_type.fields)
        return st.dictionaries(key, value, max_size=3)
    return st.lists(_one(field), max_size=4) if field.is_repeated else _one(field)


def _one(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return messages(field.message_type)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=20)
    if field.type == FieldDescriptor.TYPE_STRING:
        return _JSON | _TEXT if field.name.endswith("_json") else _TEXT
    return _SCALARS[field.cpp_type]


class Rig:
    """A server, the loop that it runs on, and what it has logged as errors."""

    def __init__(self, runner: asyncio.Runner, server: FakeEngineServer) -> None:
        self.server = server
        self._runner = runner
        self._log = _Errors(logging.WARNING)
        self._tasks = 0

    @classmethod
    @contextlib.contextmanager
    def run(cls, config: VllmConfig) -> Iterator["Rig"]:
        """Run a server whose engine ends each request at once, and check that it is as new at the end."""
        with asyncio.Runner() as runner:
            running = FakeEngineServer.run(config)
            rig = cls(runner, runner.run(running.__aenter__()))
            loggers = [logging.getLogger(name) for name in ("", "vllm")]
            for logger in loggers:
                logger.addHandler(rig._log)
            rig.server.core.answer = [5]
            try:
                rig.do(rig.count_tasks)
                yield rig
                rig.do(rig.check_empty)
            finally:
                runner.run(running.__aexit__(None, None, None))
                for logger in loggers:
                    logger.removeHandler(rig._log)
            assert not rig._log.lines

    def do(self, work: Callable[..., Coroutine[Any, Any, _T]], *arguments: Any) -> _T:
        """Run a coroutine to its end, then check that the server serves the next request and has logged no error."""

        async def work_and_check() -> _T:
            result = await work(*arguments)
            response = await within(self.server.generate([7]))
            assert list(response.outputs[0].token_ids) == [5]
            return result

        result = self._runner.run(work_and_check())
        assert not self._log.lines
        return result

    async def count_tasks(self) -> None:
        """Take note of the tasks of a server without calls, once it has served one."""
        await within(self.server.generate([7]))
        await asyncio.sleep(0.1)
        self._tasks = len(asyncio.all_tasks())

    async def check_empty(self) -> None:
        """Check that no request is left, and no task of one."""
        await within(self.server.registry.idle())
        async with asyncio.timeout(10):
            while len(asyncio.all_tasks()) > self._tasks:  # noqa: ASYNC110  # they have no event
                await asyncio.sleep(0)
        assert self.server.engine.unfinished == 0
        assert not self.server.core.live


class _Errors(logging.Handler):
    """Keeps what must not be logged: tracebacks, errors, tasks that nobody waited for."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.exc_info or record.name == "asyncio":
            self.lines.append(self.format(record))


REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
}
"""What a caller is told of a request that is its own fault."""


def check_refusal(error: grpc.aio.AioRpcError) -> Failure:
    """Check that a failure is a refusal of ours, in full, and return what it says."""
    failure = Failure.of(error)
    assert failure.code in REFUSALS, failure
    assert failure.domain == ERROR_DOMAIN
    assert failure.reason in set(Reason)
    assert failure.message
    return failure


def class_of(descriptor: Descriptor) -> type[Message]:
    """Return a message type's class."""
    return GetMessageClass(descriptor)
