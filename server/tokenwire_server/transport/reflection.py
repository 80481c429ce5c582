"""Server reflection, so that grpcurl and `buf curl` can call the server without proto files.

grpcio-reflection implements v1alpha only. Newer tools try v1 first, which has the same messages in another package.
"""

from collections.abc import Iterable

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from grpc_reflection.v1alpha import reflection, reflection_pb2

V1 = "grpc.reflection.v1.ServerReflection"
V1ALPHA: str = reflection.SERVICE_NAME


def add(server: grpc.aio.Server, names: Iterable[str]) -> None:
    """Serve reflection v1 and v1alpha for the named services and for reflection itself."""
    servicer = reflection.aio.ReflectionServicer((*names, V1, V1ALPHA), pool=_Pool())
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for name in (V1, V1ALPHA):
        generic = grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler})
        server.add_generic_rpc_handlers((generic,))


class _Pool:
    """protobuf's default descriptor pool, plus reflection v1 and look-up of methods as symbols, which protobuf lacks."""

    def __init__(self) -> None:
        pool = descriptor_pool.Default()
        _add_v1(pool)
        self._find = pool.FindFileContainingSymbol
        self.FindFileByName = pool.FindFileByName
        self.FindMessageTypeByName = pool.FindMessageTypeByName
        self.FindExtensionByNumber = pool.FindExtensionByNumber
        self.FindAllExtensions = pool.FindAllExtensions

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:  # noqa: N802  # protobuf's name
        """Return the file that defines a symbol.

        Raises:
            KeyError: no file defines it.

        """
        try:
            return self._find(symbol)
        except KeyError:
            service, _, method = symbol.rpartition(".")
            file = self._find(service)
            for candidate in file.services_by_name.values():
                if candidate.full_name == service and method in candidate.methods_by_name:
                    return file
            raise


def _add_v1(pool: descriptor_pool.DescriptorPool) -> None:
    # Tools describe each listed service, reflection v1 among them.
    try:
        pool.FindServiceByName(V1)
    except KeyError:
        v1 = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(v1)
        v1.name, v1.package = "grpc/reflection/v1/reflection.proto", "grpc.reflection.v1"
        for message in v1.message_type:
            for field in message.field:
                if field.type_name:
                    field.type_name = _renamed(field.type_name)
        for method in v1.service[0].method:
            method.input_type, method.output_type = _renamed(method.input_type), _renamed(method.output_type)
        pool.Add(v1)


def _renamed(type_name: str) -> str:
    return type_name.replace(".grpc.reflection.v1alpha.", ".grpc.reflection.v1.")
