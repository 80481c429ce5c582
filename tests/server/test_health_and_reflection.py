"""The standard services beside ours."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from vllm.config import VllmConfig

from fake_engine import FakeEngineServer, collect, within

SERVICE = "tokenwire.v1.EngineService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

each_name = pytest.mark.parametrize("name", ["", SERVICE])


@pytest.fixture
async def loading(vllm_config: VllmConfig) -> AsyncIterator[FakeEngineServer]:
    async with FakeEngineServer.run(vllm_config, ready=False) as server:
        yield server


async def status(server: FakeEngineServer, name: str) -> int:
    stub = health_pb2_grpc.HealthStub(server.channel)
    response = await within(stub.Check(health_pb2.HealthCheckRequest(service=name)))
    result: int = response.status
    return result


@each_name
async def test_health_while_loading_and_when_ready(loading: FakeEngineServer, name: str) -> None:
    assert await status(loading, name) == NOT_SERVING
    await loading.transport.set_serving(True)
    assert await status(loading, name) == SERVING
    await loading.transport.set_serving(False)
    assert await status(loading, name) == NOT_SERVING


async def test_the_list_has_every_service(server: FakeEngineServer) -> None:
    response = await within(health_pb2_grpc.HealthStub(server.channel).List(health_pb2.HealthListRequest()))
    assert {name: entry.status for name, entry in response.statuses.items()} == {"": SERVING, SERVICE: SERVING}


@each_name
async def test_a_watch_tells_each_change(loading: FakeEngineServer, name: str) -> None:
    """FIELD_LOG 19."""
    watch = health_pb2_grpc.HealthStub(loading.channel).Watch(health_pb2.HealthCheckRequest(service=name))
    assert (await within(watch.read())).status == NOT_SERVING
    await loading.transport.set_serving(True)
    assert (await within(watch.read())).status == SERVING
    await loading.transport.set_serving(False)
    assert (await within(watch.read())).status == NOT_SERVING
    watch.cancel()


async def test_a_watch_ends_with_the_server_and_with_its_last_status(loading: FakeEngineServer) -> None:
    """FAULTS C7: it neither holds up the end nor breaks in it."""
    watches = [health_pb2_grpc.HealthStub(loading.channel).Watch(health_pb2.HealthCheckRequest()) for _ in range(3)]
    await loading.transport.set_serving(True)
    for watch in watches:
        while (await within(watch.read())).status != SERVING:
            pass
    await loading.transport.set_serving(False)
    # As long as a test may take: the watches must not wait for it.
    await within(loading.transport.stop(100))
    for watch in watches:
        assert [message.status for message in await collect(watch)] == [NOT_SERVING]
        assert await within(watch.code()) == grpc.StatusCode.OK


async def test_an_unknown_service(server: FakeEngineServer) -> None:
    """FIELD_LOG 19."""
    stub = health_pb2_grpc.HealthStub(server.channel)
    request = health_pb2.HealthCheckRequest(service="other")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await within(stub.Check(request))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    watch = stub.Watch(request)
    assert (await within(watch.read())).status == SERVICE_UNKNOWN
    watch.cancel()


async def reflect(server: FakeEngineServer, version: str, **request: Any) -> Any:
    call = server.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )()
    await within(call.write(reflection_pb2.ServerReflectionRequest(**request)))
    response = await within(call.read())
    await call.done_writing()
    assert await within(call.read()) is grpc.aio.EOF
    return response


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_the_services(server: FakeEngineServer, version: str) -> None:
    """FIELD_LOG 18."""
    response = await reflect(server, version, list_services="")
    names = {service.name for service in response.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health", f"grpc.reflection.{version}.ServerReflection"} <= names


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_describes_the_service(server: FakeEngineServer, version: str) -> None:
    """FIELD_LOG 18."""
    response = await reflect(server, version, file_containing_symbol=SERVICE)
    files = [FileDescriptorProto.FromString(raw) for raw in response.file_descriptor_response.file_descriptor_proto]
    [service] = [service for file in files for service in file.service]
    methods = {method.name for method in service.method}
    assert methods == {"Generate", "GenerateStream", "Multiplex", "Abort", "GetEngineInfo", "GetLoad"}


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_describes_all_that_it_lists_and_each_method(server: FakeEngineServer, version: str) -> None:
    response = await reflect(server, version, list_services="")
    names = [service.name for service in response.list_services_response.service]
    for name in [*names, f"{SERVICE}.Generate", "tokenwire.v1.GenerationInput.request_id"]:
        found = await reflect(server, version, file_containing_symbol=name)
        assert found.file_descriptor_response.file_descriptor_proto, name
    for name in ("absent", f"{SERVICE}.Absent", "absent.Service.Method"):
        refused = await reflect(server, version, file_containing_symbol=name)
        assert refused.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
