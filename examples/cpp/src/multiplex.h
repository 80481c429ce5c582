#ifndef TOKENWIRE_EXAMPLE_MULTIPLEX_H_
#define TOKENWIRE_EXAMPLE_MULTIPLEX_H_

#include "tokenwire/v1/engine_service.grpc.pb.h"

// Runs several requests on one bidirectional stream and prints how each sequence finished.
grpc::Status Multiplex(tokenwire::v1::EngineService::Stub& engine, const tokenwire::v1::GenerationInput& greedy);

#endif
