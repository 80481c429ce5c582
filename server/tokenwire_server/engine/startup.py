"""Steps between loading the model and the first request."""

import gc
import logging
from collections.abc import Iterable

from vllm import envs
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from tokenwire._contract import Reason
from tokenwire_server.conversion.exceptions import first_line
from tokenwire_server.engine.adapters import AdapterError
from tokenwire_server.errors import RequestError

logger = logging.getLogger(__name__)


async def get_ready(llm: AsyncLLM, adapters: Iterable[LoRARequest]) -> None:
    """Check that the model can generate, load its adapters and prepare this process for requests.

    Raises:
        RequestError: UNSUPPORTED_METHOD, the model does not generate.
        AdapterError: an adapter cannot be loaded.

    """
    tasks = await llm.get_supported_tasks()
    if "generate" not in tasks:
        raise RequestError(Reason.UNSUPPORTED_METHOD, f"this model does not generate; it supports {', '.join(tasks)}")
    for adapter in adapters:
        await _load(llm, adapter)
    # vLLM reads environment variables for every token unless they are cached.
    envs.enable_envs_cache()
    # Full collections over the objects of vLLM's and torch's modules pause the server for up to 350 ms.
    gc.collect()
    gc.freeze()


async def _load(llm: AsyncLLM, adapter: LoRARequest) -> None:
    try:
        await llm.add_lora(adapter)
    except EngineDeadError:
        raise
    except Exception as error:  # failures in the engine process arrive as text
        raise AdapterError(adapter, first_line(error)) from error
    logger.info("loaded LoRA adapter %s from %s", adapter.lora_name, adapter.lora_path)
