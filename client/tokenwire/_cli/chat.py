"""`tokenwire chat`: chat with the model."""

import asyncio
import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenwire._cli.options import Connect, connect, sampling_params, with_options
from tokenwire._cli.output import print_note, print_part
from tokenwire._cli.requires import requires
from tokenwire._cli.run import INTERRUPTED, report
from tokenwire._client import AsyncClient
from tokenwire._errors import TokenwireError
from tokenwire._sampling_params import SamplingParams

if TYPE_CHECKING:
    from tokenwire.text import Message, TextClient

EXAMPLES = """
Examples:

tokenwire chat

tokenwire chat "How many countries are in the European Union?" --temperature 0 --stop .

tokenwire chat --tokenizer MODEL_DIR --system "Answer in one word." < question.txt
"""


@with_options("server", connect)
@with_options("params", sampling_params)
def chat(
    message: Annotated[
        str | None,
        typer.Argument(
            metavar="MESSAGE",
            help="One message to answer. Without it: a conversation, or standard input if it is not a terminal.",
        ),
    ] = None,
    *,
    server: Connect,
    params: SamplingParams,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder with tokenizer and chat template. [default: the engine's model folder]"
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Stop string; may be repeated.")] = None,
) -> None:
    """Stream the model's answer to a message, or start a conversation.

    Ctrl-C aborts the answer in the engine; a conversation continues with the next message.

    Ctrl-D or an empty line ends a conversation. Needs the extra `text`.
    """
    with requires("pip install 'tokenwire[text]'"):
        import tokenwire.text  # noqa: F401
    if message is None and not sys.stdin.isatty():
        message = sys.stdin.read()
    raise typer.Exit(_Chat(server(), params, system=system, stop=stop).run(tokenizer, message))


class _Chat:
    """A conversation. Its turns share an event loop; Ctrl-C aborts one turn."""

    def __init__(
        self, client: AsyncClient, params: SamplingParams, *, system: str | None, stop: list[str] | None
    ) -> None:
        self._client = client
        self._params = params
        self._stop = stop
        self._messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]

    def run(self, folder: Path | None, message: str | None) -> int:
        """Answer one message, or each message typed by the user. Returns the exit code."""
        from tokenwire.text import TextClient

        with asyncio.Runner() as runner:
            try:
                text = runner.run(TextClient.open(self._client, folder))
                if message is not None:
                    runner.run(self._answer(text, message))
                while message is None and (line := _ask()):
                    self._turn(runner, text, line)
            except KeyboardInterrupt:
                return INTERRUPTED
            except TokenwireError as error:
                return report(error)
            finally:
                runner.run(self._client.close())
        return 0

    def _turn(self, runner: asyncio.Runner, text: "TextClient", line: str) -> None:
        """Answer one message of a conversation. A turn that fails or is aborted is removed from it."""
        num_messages = len(self._messages)
        try:
            runner.run(self._answer(text, line))
        except KeyboardInterrupt:
            typer.echo("\ntokenwire: aborted", err=True)
        except TokenwireError as error:
            report(error)
        else:
            return
        del self._messages[num_messages:]

    async def _answer(self, text: "TextClient", message: str) -> None:
        self._messages.append({"role": "user", "content": message})
        started = time.perf_counter()
        async with text.stream(self._messages, self._params, stop=self._stop) as pieces:
            async for piece in pieces:
                print_part(piece)
        typer.echo()
        result = pieces.result
        self._messages.append({"role": "assistant", "content": result.text})
        count = result.usage.completion_tokens
        print_note(f"{result.finish_reason}; {count} tokens, {count / (time.perf_counter() - started):.1f} tokens/s")


def _ask() -> str:
    """Read the user's next message; empty at the end."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # adds line editing to input()
    try:
        return input("> ")
    except EOFError:
        typer.echo()
        return ""
