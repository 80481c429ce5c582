"""The tokenizer of the model: loaded for stop strings, and archived for coordinators that do not have its files."""

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
"""Files of a tokenizer and its chat template, plus the configuration files that coordinators read."""


class ModelTokenizer:
    """The tokenizer of a model, loaded on first use."""

    def __init__(self, name: str, revision: str | None) -> None:
        """Set the source; nothing is loaded yet.

        Args:
            name: a local folder or a name on the Hugging Face Hub.
            revision: the revision on the Hub; None means the default branch.

        """
        self._name = name
        self._revision = revision
        self._loading: asyncio.Task[TextTokenizer] | None = None

    async def load(self) -> TextTokenizer:
        """Return the tokenizer; concurrent calls share one load, and a failed load is retried by the next call.

        Raises:
            RequestError: TOKENIZER_REQUIRED, the model has no usable tokenizer.

        """
        if self._loading is None:
            self._loading = asyncio.create_task(asyncio.to_thread(self._load))
        loading = self._loading
        try:
            # A cancelled call must not cancel the load that other calls wait for.
            return await asyncio.shield(loading)
        except RequestError:
            # The Hub may be reachable the next time.
            if self._loading is loading:
                self._loading = None
            raise

    async def archive(self) -> bytes:
        """Return the tokenizer's files as a ZIP archive.

        Raises:
            RequestError: TOKENIZER_REQUIRED, the model has no tokenizer files.

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
        # ZIP cannot represent all modification times.
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
        except (OSError, ValueError) as error:  # the errors of huggingface_hub are subclasses
            raise _unusable(str(error).strip().partition("\n")[0]) from error


def _unusable(reason: str) -> RequestError:
    return RequestError(Reason.TOKENIZER_REQUIRED, f"the model has no usable tokenizer: {reason}")
