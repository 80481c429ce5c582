"""The model's tokenizer: for stop strings, and its files for coordinators that have none."""

import asyncio
import io
import zipfile
from pathlib import Path

import huggingface_hub

from tokenwire._contract import Reason
from tokenwire.text import TextError, TextTokenizer
from tokenwire_server.errors import RequestError

_PATTERNS = (
    *("tokenizer*.json", "special_tokens_map.json", "vocab.json", "merges.txt", "*.model", "*.tiktoken"),
    *("chat_template*", "*.jinja", "config.json", "generation_config.json"),
)
"""What a tokenizer and its chat template are made of, in a model's folder; coordinators also look into the configuration."""


class ModelTokenizer:
    """A model's tokenizer, loaded when it is first asked for."""

    def __init__(self, name: str, revision: str | None) -> None:
        """Name a tokenizer.

        Args:
            name: a folder, or a name on the hub.
            revision: which of its revisions on the hub; None means the newest.

        """
        self._name = name
        self._revision = revision
        self._loading: asyncio.Task[TextTokenizer] | None = None

    async def load(self) -> TextTokenizer:
        """Return the tokenizer.

        Raises:
            RequestError: the model has none that can be used, TOKENIZER_REQUIRED.

        """
        if self._loading is None:
            self._loading = asyncio.create_task(asyncio.to_thread(self._load))
        loading = self._loading
        try:
            # For all who wait, whoever of them goes away.
            return await asyncio.shield(loading)
        except RequestError:
            # The hub may be reached the next time.
            if self._loading is loading:
                self._loading = None
            raise

    async def archive(self) -> bytes:
        """Return the tokenizer's files as a ZIP archive.

        Raises:
            RequestError: the model has none, TOKENIZER_REQUIRED.

        """
        return await asyncio.to_thread(self._archive)

    def _load(self) -> TextTokenizer:
        try:
            return TextTokenizer.load(self._folder())
        except TextError as error:
            raise _unusable(str(error)) from error

    def _archive(self) -> bytes:
        folder = self._folder()
        files = sorted({path for pattern in _PATTERNS for path in folder.glob(pattern) if path.is_file()})
        if not any(path.name not in {"config.json", "generation_config.json"} for path in files):
            raise _unusable(f"no tokenizer in {folder}")
        archive = io.BytesIO()
        # A file's time may be one that ZIP cannot hold.
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as writer:
            for path in files:
                writer.write(path, path.name)
        return archive.getvalue()

    def _folder(self) -> Path:
        folder = Path(self._name)
        if folder.is_dir():
            return folder
        try:
            return Path(
                huggingface_hub.snapshot_download(self._name, revision=self._revision, allow_patterns=list(_PATTERNS))
            )
        except (OSError, ValueError) as error:  # those of the hub's own among them
            raise _unusable(str(error).strip().partition("\n")[0]) from error


def _unusable(why: str) -> RequestError:
    return RequestError(Reason.TOKENIZER_REQUIRED, f"the model has no tokenizer that can be used: {why}")
