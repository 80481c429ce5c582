"""A KV connector whose transfers a test ends: `KVTransferConfig(kv_connector_module_path="fake_engine.connector")`."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


class FetchingConnector(KVConnectorBase_V1):  # type: ignore[misc]  # vLLM's types are Any here
    """Says that the whole prompt is computed elsewhere, and is being fetched until somebody says otherwise."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return request.num_tokens - num_computed_tokens, True

    def update_state_after_alloc(self, *_arguments: Any) -> None:
        pass

    def build_connector_meta(self, _output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def start_load_kv(self, *_arguments: Any, **_options: Any) -> None:
        raise AssertionError("only workers do")

    wait_for_layer_load = save_kv_layer = wait_for_save = start_load_kv
